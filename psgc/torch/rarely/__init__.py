"""Ranks that exchange once in many steps: LocalSGD, DiLoCo and Streaming DiLoCo."""
