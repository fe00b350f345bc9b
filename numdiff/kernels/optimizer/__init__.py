"""From gradients to the next step's weights, without one read by the host. Read the files in this
order.

    zero_ranges.py  gradients set to zero, many arrays in one launch
    grad_norm.py    the norm of all gradients
    adamw.py        the step itself
    ema.py          the moving average of the weights
    step_state.py   step count, learning rate and seeds on the device
    telemetry.py    what a log line needs, gathered on the device
    loss_scale.py   what keeps float16's small gradients alive

READ NEXT
    zero_ranges.py
"""
