"""Transports of the gradients' sum between GPUs (distributed/exchange.py): `--transport peer` and
`nccl`.

peer.py            the transport `peer`: which ranks it suits; by peer_exchange.py, and over several hosts
                   hosts_exchange.py
peer_exchange.py   the GPUs of one host read each other's memory: after the backward pass, or during it by kernels
                   (overlap.py) or copy engines (copies.py)
reduce.py          its kernels: a sum over GPUs, with a barrier between them
pieces.py          a sum of pieces of the gradient, during the backward pass
hosts_exchange.py  `peer` within each host, another transport between them
nccl_exchange.py   the transport `nccl`: NCCL's all-reduce, through nccl4py
"""
