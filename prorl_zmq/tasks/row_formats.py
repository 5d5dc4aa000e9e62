"""The row formats of all tasks that come with the package, the most special ones first."""

from __future__ import annotations

from . import code_formats as code_forms
from . import math, stem
from . import swe_formats as swe_forms

ROW_FORMATS = (*swe_forms.ROW_FORMATS, *code_forms.ROW_FORMATS, *math.ROW_FORMATS, *stem.ROW_FORMATS)
