"""Model families that Megatron trains, a file of rules each, found through the entry points of group `slime.models`."""
