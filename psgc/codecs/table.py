"""The table of codec ids: the payload that each id means on the wire, and the class that makes it.

An id means *these bytes* and these parameters; a change of either needs a new row. Rows are never removed. If a codec is merged into another
one, its id stays reserved, and its name stays as an alias (``aliases``). Ids from 32768 on are for plugins. docs/codecs.md shows this table, and
tests/golden/codecs has payloads of each row that has a text.

Owns the ids, and the names of psgc's own codecs and schemes. Imports no codec: ``registry`` loads a class when its name is first used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Row:
    """text: the codec as users write it; a name's first row has the default parameters. made_by: "module:Class" in psgc.codecs, only in a name's first row.
    retired: the text that writes the same bytes today. inner: a payload of a scheme's round, which has no text of its own."""

    codec_id: int
    text: str
    made_by: str = ""
    retired: str = ""
    inner: bool = False


ROWS: Final = (
    Row(0, "none", "none:NoneCodec"),
    Row(1, "bf16", "cast:Bf16Codec"),
    Row(2, "fp16", "cast:Fp16Codec"),
    Row(3, "int8", "int8:Int8Codec"),
    Row(4, "onebit", "onebit:OneBitCodec"),
    Row(5, "topk", "topk:TopKCodec"),
    Row(7, "int4", "int4:Int4Codec"),
    Row(6, "fp8", "fp8:Fp8Codec"),
    Row(8, "int8:rotate=1"),
    Row(9, "int4:rotate=1"),
    Row(10, "fp8:format=e5m2"),
    Row(11, "ternary", retired="dithering:k=1"),
    Row(13, "dithering", "dithering:DitheringCodec"),
    Row(14, "dithering:partition=natural"),
    Row(15, "majority", retired="onebit:ef=0,scale=unit"),
    Row(16, "onebit:ef=0,scale=unit"),
    Row(18, "graddrop", retired="topk:select=sampled"),
    Row(20, "topk:select=sampled"),
    Row(21, "blocktopk", "blocktopk:BlockTopKCodec"),
    Row(22, "randomk", "randomk:RandomKCodec"),
    Row(12, "tbq", "tbq:TbqCodec"),
    Row(24, "shared: maxima", inner=True),
    Row(25, "shared: codes", inner=True),
    Row(26, "shared: sums of 16 bits", inner=True),
    Row(27, "relay: an answer", inner=True),
    Row(28, "shared: sums of 32 bits", inner=True),
    Row(30, "functions: of the training script", inner=True),
    Row(31, "topk:select=mstopk"),
    Row(32, "blocktopk:block=4097"),
    Row(33, "rows: of a sparse gradient", inner=True),
)
CODECS: Final = {row.text: f"psgc.codecs.{row.made_by}" for row in ROWS if row.made_by}
SCHEMES: Final = {"shared": "psgc.codecs.shared:SharedScheme", "powersgd": "psgc.codecs.powersgd:PowerSgdScheme"}
# Written with the kit, which gives them their ids; found like codecs of other packages, but without a digest.
OF_KIT: Final = {
    "topk2bit": "psgc.codecs.outer:TopK2BitCodec", "dct64": "psgc.codecs.outer:Dct64Codec", "sparseloco": "psgc.codecs.outer:SparseLoCoScheme",
    "demo": "psgc.codecs.outer:DemoScheme",
}  # fmt: skip
# Named by psgc's front ends, with parameters that they know, and by no user.
OF_FRONT_ENDS: Final = {"rows": "psgc.codecs.rows:RowsCodec"}
CODEC_IDS: Final = {row.text: row.codec_id for row in ROWS}
