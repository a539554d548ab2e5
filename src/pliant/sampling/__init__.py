"""The one computation behind the four operators, in PyTorch alone. Read in this order:

problem.py     the canonical form, its axes and its three policies
checks.py      what a caller may pass, and the error for everything else
maps.py        where the feature maps lie in storage
reference.py   the computation and its adjoint in plain PyTorch: the oracle
ops.py         the registered operators: which kernel runs, and how gradients flow
"""
