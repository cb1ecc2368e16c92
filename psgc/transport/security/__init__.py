"""Who may join a job, and how its traffic stays private: proofs, keys, encryption, refusals."""
