"""What ``psgc profile`` measures: a job's gradients, codecs on this CPU, links."""
