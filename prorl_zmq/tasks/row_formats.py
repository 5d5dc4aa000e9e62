"""All row formats of the package, the most specific first."""

from __future__ import annotations

from . import code_formats, math, stem, swe_formats

ROW_FORMATS = (*swe_formats.ROW_FORMATS, *code_formats.ROW_FORMATS, *math.ROW_FORMATS, *stem.ROW_FORMATS)
