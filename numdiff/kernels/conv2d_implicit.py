def flipped_weight(*a): raise NotImplementedError
implicit_forward = implicit_weight_gradient = flipped_weight
