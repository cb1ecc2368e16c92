"""A machine's topology: GPUs, their links, PCIe switches, network interfaces, NUMA nodes. ``detect`` looks at the machine; the other modules take text
and folders."""

from psgc.launch.topology.detect import as_detected, detect, switch_size, told
from psgc.launch.topology.machine import Gpu, Nic, Topology

__all__ = ["Gpu", "Nic", "Topology", "as_detected", "detect", "switch_size", "told"]
