"""Matrix multiplication."""
from .launcher import matmul_backward, matmul_forward
from .reference import matmul_forward_cost, matmul_forward_reference

__all__ = ["matmul_backward", "matmul_forward", "matmul_forward_cost", "matmul_forward_reference"]
