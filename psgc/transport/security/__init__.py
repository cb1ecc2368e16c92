"""Who may come in, and what nobody else may read: proofs, keys, encryption, refusals."""
