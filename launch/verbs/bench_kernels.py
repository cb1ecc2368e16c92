"""The verb ``psgc bench kernels``: codecs' speeds on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from psgc.errors import CodecError, PsgcError
from psgc.launch.flags import Json
from psgc.launch.tables import print_table, progress
from psgc.launch.usage import refuse_beside


def kernels(
    context: typer.Context,
    sizes: Annotated[str, typer.Option(help="Elements, one size after the other.")] = "64K,1M,16M",
    numel: Annotated[int | None, typer.Option(help="Elements: one size, in place of --sizes.")] = None,
    codec: Annotated[list[str] | None, typer.Option(help="Codec; give it several times for several. Default: all.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    baselines: Annotated[bool, typer.Option(help="Time the same in NumPy, torch and torch.compile beside it.")] = True,
    as_json: Json = False,
) -> None:
    """Time every codec's encode, decode and server kernels against memcpy, on a GPU against a copy there; wrong kernels are not timed.

    Example: psgc bench kernels --sizes 64K,1M --codec onebit
    """
    if numel is not None:
        refuse_beside(context, ("sizes",), f"--numel {numel} is the one size; give one of them")
    with progress(as_json):
        from psgc.codecs import registered_codecs, registered_schemes
        from psgc.launch.bench.baselines import IMPLEMENTATIONS
        from psgc.launch.bench.kernels import bench_kernels, read_sizes, timed_subject
        from psgc.launch.bench.tables import bytes_text, ratio_table, time_table

    elements = read_sizes(sizes) if numel is None else [numel]
    if device == "cuda":
        _on_gpu(elements, codec, baselines, as_json)
        return
    chosen = [timed_subject(text).canonical for text in codec or (*registered_codecs(), *registered_schemes())]
    try:
        with progress(as_json) as tell:
            result = bench_kernels(elements, chosen, device, tell, IMPLEMENTATIONS if baselines else ())
    except CodecError as error:  # the codecs exist: a kernel is wrong
        raise PsgcError(str(error)) from None
    if as_json:
        print(json.dumps(result))
        return
    print(f"{result['machine']}; memcpy of {bytes_text(4 * max(elements))}: {result['memcpy_gbps']:.2f} GB/s. One thread.")
    print_table(*ratio_table(result), title=f"times memcpy's speed, {bytes_text(4 * max(elements))} of fp32")
    print_table(*time_table(result), title="nanoseconds an element")
    for implementation, why in result["left_out"].items():
        print(f"without {implementation}: {why}")


def _on_gpu(elements: list[int], codec: list[str] | None, baselines: bool, as_json: bool) -> None:
    from psgc.codecs import parse_codec, registered_codecs
    from psgc.launch.bench.gpu_kernels import IMPLEMENTATIONS, CudaStopwatch, bench_gpu_kernels, gpu_table

    watch = CudaStopwatch()
    chosen = [parse_codec(text).canonical for text in codec or registered_codecs()]
    try:
        with progress(as_json) as tell:
            result = bench_gpu_kernels(elements, chosen, watch, tell, IMPLEMENTATIONS if baselines else ())
    except CodecError as error:
        raise PsgcError(str(error)) from None
    if as_json:
        print(json.dumps(result))
        return
    largest = max(elements)
    print(f"{result['device']}; a copy on the device of {4 * largest:,} bytes: {result['copy_gbps'][largest]:,.0f} GB/s, read and written")
    print_table(*gpu_table(result), title=f"{largest:,} elements of fp32; GB/s of the bytes that each operation has to move")
    if result["without"]:
        print(f"without a GPU side: {', '.join(result['without'])}")
    for implementation, why in result["left_out"].items():
        print(f"without {implementation}: {why}")
