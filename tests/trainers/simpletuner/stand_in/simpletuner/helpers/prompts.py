"""A stand-in of SimpleTuner's module: the names that the live adapter uses."""


class PromptHandler:
    """Leaves captions as they are, but for a word that is filtered."""

    @staticmethod
    def filter_caption(data_backend, caption):
        """Return a caption without a word, or None if it is unusable."""
        return None if caption == "unusable" else caption.replace("forbidden ", "")
