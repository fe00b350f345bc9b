"""The ranks of a job: several processes that train one model, each on its part of every batch.

launcher.py        the launcher of this process, alone or as one of several
communicator.py    what the ranks tell each other: options, batches, failures; sums on the host
failures.py        what is said of an error that ends a job, and the code that a process then ends with
buckets.py         the gradient split into buckets that are completed one after another during the backward pass
exchange.py        the sum of the ranks' gradients: what it is, and which transport a run gets
mpi_exchange.py    the sum over MPI; extras/transports has those between GPUs
watchdog.py        a rank that is lost or stuck ends the job, and a message says so
monitor.py         says which rank was killed, where the launcher kills the others at once
start_guard.py     the same while MPI starts
same_code.py       ranks with other sources are refused
shared_memory.py   what killed jobs have left behind
together.py        work that ranks share and that may be stopped at any moment
"""
