"""Manifests by which Kubernetes starts a job: ``psgc k8s render``."""
