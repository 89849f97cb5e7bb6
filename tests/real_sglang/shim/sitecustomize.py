"""Lets the CUDA build of torchvision be imported without CUDA: it looks for two operators that its library defines."""

import importlib.abc
import importlib.machinery
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            _define_operators()
        return None


def _define_operators():
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._slime_torchvision_library = library  # it lives as long as torch does


sys.meta_path.insert(0, _BeforeTorchvision())
