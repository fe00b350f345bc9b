from .faults import Fault, KernelFault, LaunchRefused, Unsupported
from .machine import Emulator
from .namespace import twin
