"""Where verl keeps engines by backend."""

from typing import Any

GLOBAL_ENGINE_DICT: dict[str, Any] = {}
