NARROW=8
def narrow_forward(*a): raise NotImplementedError
narrow_weight_gradient = narrow_forward
