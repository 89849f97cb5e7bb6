"""The language of a text, by langdetect, which IFEval is defined with."""

from __future__ import annotations

from functools import cached_property
from typing import Any

ENOUGH_CHARACTERS = 10_000
"""langdetect itself looks at no more."""


class LanguageDetector:
    """Loads the profiles when the first text comes; the same text always gets the same answer."""

    def language(self, text: str) -> str | None:
        """ISO 639-1 code (zh-cn, zh-tw for Chinese); None where no language can be told."""
        from langdetect.lang_detect_exception import LangDetectException

        detector = self._factory.create()
        try:
            detector.append(text[:ENOUGH_CHARACTERS])
            return str(detector.detect())
        except LangDetectException:
            return None

    @cached_property
    def _factory(self) -> Any:
        from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

        factory = DetectorFactory()
        factory.load_profile(PROFILES_DIRECTORY)
        factory.set_seed(0)
        return factory
