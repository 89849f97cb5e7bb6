"""`--convert-train-data samples`: every sample of every group, as it is."""

from slime_core import Group, TrainBatch, hookimpl


@hookimpl
def convert_train_data(groups: list[Group]) -> TrainBatch:
    """The round's samples packed into a TrainBatch."""
    return TrainBatch.from_samples([sample for group in groups for sample in group])
