"""A stand-in of SimpleTuner's module: the names that the live adapter uses."""


class StateTracker:
    """What the caches ask for."""

    args = None
    config: dict = {}
    metadata: dict = {}
    mappings: list = []
    images: list = []

    @classmethod
    def get_args(cls):
        """The command line."""
        return cls.args

    @classmethod
    def get_data_backend_config(cls, data_backend_id):
        """The settings of a data set."""
        return cls.config

    @classmethod
    def get_metadata_by_filepath(cls, filepath, data_backend_id, search_dataset_types):
        """What is known of a picture."""
        return cls.metadata.get(filepath)

    @classmethod
    def get_conditioning_mappings(cls):
        """Pairs of data sets."""
        return cls.mappings
