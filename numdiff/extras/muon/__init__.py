"""Muon: steps of the blocks' weight matrices made orthogonal, `--optimizer muon`. Read the files in
this order.

symmetric_epilogue.py    Hopper's product where the result is symmetric: half of the tiles, each stored twice
symmetric.py             such a product
newton_schulz.py         the nearest orthogonal matrix, by products alone
update.py                the update of all matrices of a shape
optimizer.py             `numdiff.nn.Muon`
"""
