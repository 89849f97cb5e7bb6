"""Errors a user can act on: what happened, where, what to do. The CLI prints them without a traceback."""


class SlimeError(Exception):
    """Base of every error whose message is written for the user."""


class OptionError(SlimeError):
    """A flag, a config key or an environment variable is wrong."""


class PluginError(SlimeError):
    """A plugin cannot be found, loaded or used, or broke its hook's contract."""


class DataError(SlimeError):
    """A data set or one of its rows cannot be used."""


class EngineError(SlimeError):
    """An inference engine or the router refused a request or did not answer."""


class ClusterError(SlimeError):
    """Ray could not place or start a part of the run."""


class EnginesLostError(ClusterError):
    """No engine serves any more, and none could be started again."""


class CheckpointError(SlimeError):
    """A checkpoint cannot be written or resumed from."""


class WeightSyncError(SlimeError):
    """An engine did not take the trainer's weights."""


class WeightsDifferError(WeightSyncError):
    """An engine uses other weights than it was sent, or computes other numbers with them."""


class RolloutError(SlimeError):
    """A round cannot be collected."""
