"""The vendor's layers."""

from .module import DCNv2, ModulatedDeformConv

__all__ = ["DCNv2", "ModulatedDeformConv"]
