"""The measurements of ``psgc profile``: a job's gradients, codecs on this CPU, links."""
