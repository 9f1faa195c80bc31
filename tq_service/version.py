"""The version of the package, which services and clients show each other."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
