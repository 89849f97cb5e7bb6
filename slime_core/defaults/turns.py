"""`--convert-train-data turns`: every turn of a sample is trained as a response of its own."""

from slime_core import Group, TrainBatch, hookimpl, split_turns


@hookimpl
def convert_train_data(groups: list[Group]) -> TrainBatch:
    """The turns of the round's samples, each with the reward of its whole trajectory; see `split_turns`."""
    return TrainBatch.from_samples([part for group in groups for sample in group for part in split_turns(sample)])
