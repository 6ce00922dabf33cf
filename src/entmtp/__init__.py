"""EntMTP: entropy-guided scheduling of draft trees for multi-token prediction, lossless and replayable.

    from entmtp import load, generate

gives the library (`entmtp.api`), loaded on first use: importing the package alone imports nothing else.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entmtp.api import LanguageModel, Result, Stream, custom_generate, generate, load, stateless

__version__ = "0.1.0"
__all__ = ["LanguageModel", "Result", "Stream", "__version__", "custom_generate", "generate", "load", "stateless"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from entmtp import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
