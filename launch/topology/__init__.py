"""What a machine is made of: GPUs, their links, PCIe switches, network interfaces, NUMA nodes. ``detect`` looks; all else takes text and folders."""

from psgc.launch.topology.detect import as_detected, detect, switch_size, told
from psgc.launch.topology.machine import Gpu, Nic, Topology

__all__ = ["Gpu", "Nic", "Topology", "as_detected", "detect", "switch_size", "told"]
