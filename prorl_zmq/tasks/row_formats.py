"""The forms of all tasks that come with the package, the most special ones first."""

from __future__ import annotations

from . import code_formats as code_forms
from . import math, stem
from . import swe_formats as swe_forms

FORMS = (*swe_forms.FORMS, *code_forms.FORMS, *math.FORMS, *stem.FORMS)
