"""The experiments of four papers, each claim as data, beside what this project finds: ``python -m psgc.reproduce PAPER`` from a checkout."""
