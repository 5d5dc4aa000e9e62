"""All row formats of the package, the most specific first."""

from __future__ import annotations

from . import code_formats, math, nemo_gym_rows, stem, swe_formats

ROW_FORMATS = (
    *nemo_gym_rows.ROW_FORMATS,
    *swe_formats.ROW_FORMATS,
    *code_formats.ROW_FORMATS,
    *math.ROW_FORMATS,
    *stem.ROW_FORMATS,
)
