"""The calls random programs are made of: one line a call, as a user would write it.

A hole `<kind shape>` is filled with a value of the program or a new input, `{a|b}` with one of the
alternatives. Kinds: f floating but not float64 (any mix of float32, bfloat16, float16), w the same
where it may be written to, d float64, i int64, b bool, c complex; p a parameter-like float32 input,
o one that needs no gradient (an out= destination, running statistics), k int64 indices in 0..3.
Shapes: `4,8` is that shape, `...,8` ends so, `?,?` has two dimensions, `*` is any, `=` is that of
the first hole. `make(f, ...)` calls `f` such that a symbolic trace keeps it as one node, as Dynamo
would; `attention` is `F.multi_head_attention_forward`.
"""

import re

from program_rows_following import FOLLOWING

ALLOW = """
F.linear(<f ...,8>, <p 8,8>, <p 8>)
F.linear(<f ...,8>, <p 8,8>)
F.linear(<f ...,8>, <f 4,8>)
<f ...,8> @ <f 8,8>
torch.matmul(<f 4,8>, <f 8,8>)
torch.mm(<f 4,8>, <f 8,8>)
<f 2,4,8>.bmm(<f 2,8,8>)
torch.addmm(<f 8>, <f 4,8>, <f 8,8>, {beta=1|beta=0.5, alpha=2})
torch.baddbmm(<f 2,4,8>, <f 2,4,8>, <f 2,8,8>)
torch.addbmm(<f 4,8>, <f 2,4,8>, <f 2,8,8>)
torch.addmv(<f 4>, <f 4,8>, <f 8>)
torch.mv(<f 4,8>, <f 8>)
torch.addr(<f 4,8>, <f 4>, <f 8>)
torch.outer(<f 4>, <f 8>)
F.conv1d(<f 2,4,8>, <p 4,4,3>, <p 4>, padding={1|'same'})
F.conv2d(<f 2,4,6,6>, <p 4,4,3,3>, {None|<p 4>}, padding=1)
F.conv_transpose2d(<f 2,4,6,6>, <p 4,4,3,3>, padding=1)
F.conv3d(<f 1,2,4,4,4>, <p 2,2,3,3,3>, padding=1)
F.prelu(<f *>, <p 1>)
F.scaled_dot_product_attention(<f 2,4,8>, <f 2,4,8>, <f 2,4,8>, is_causal={True|False})
torch.einsum('bij,jk->bik', <f 2,4,8>, <f 8,8>)
torch.einsum('ij,kj,lk->il', <f 4,8>, <f 4,8>, <f 8,4>)
torch.linalg.vecdot(<f ...,8>, <f =>)
torch.linalg.multi_dot([<f 4,8>, <f 8,8>, <f 8,4>])
torch.gru_cell(<f 4,8>, <f 4,8>, <p 24,8>, <p 24,8>)
torch.lstm_cell(<f 4,8>, (<f 4,8>, <f 4,8>), <p 32,8>, <p 32,8>)
torch.rnn_tanh_cell(<f 4,8>, <f 4,8>, <p 8,8>, <p 8,8>)
attention(<f 4,2,8>, <f 4,2,8>, <f 4,2,8>, <p 24,8>, <p 24>, <p 8,8>, <p 8>, {True|False})
F.bilinear(<f 4,8>, <f 4,8>, <p 8,8,8>)
torch.tensordot(<f 4,8>, <f 8,8>, dims=1)
F.linear(<f ...,8>.float(), <p 8,8>)
F.linear(<f 4,8>.to(torch.float32).t().reshape(4, 8), <p 8,8>)
<f ...,8>.float().view(-1, 8) @ <f 8,8>
torch.mm(<f 2,4,8>.float()[0], <p 8,8>)
"""

# Ops that one of the lists sends to float32, keeps accumulating in float32 or promotes.
DENY = """
torch.softmax(<f *>, {-1|0})
F.softmax(<f *>, -1{|, dtype=torch.float64|, dtype=torch.float32})
F.log_softmax(<f *>, -1)
F.layer_norm(<f ...,8>, (8,))
F.layer_norm(<f ...,8>, (8,), <p 8>, <p 8>)
F.rms_norm(<f ...,8>, (8,), {None|<p 8>})
F.group_norm(<f 2,4,6,6>, 2)
F.batch_norm(<f 2,4,6,6>, <o 4>, <o 4>, training=True)
F.instance_norm(<f 2,4,6,6>)
torch.exp(<f *>)
torch.expm1(<f *>)
torch.log1p(<f *>.abs())
torch.log(<f *>.abs() + 1)
torch.rsqrt(<f *>.abs() + 1)
torch.reciprocal(<f *> + 3)
<f *> ** {2|0.5|3}
torch.pow(<f *>, <f =>)
torch.pow(2, <f *>)
<f *>.sum({|-1|0})
torch.sum(<f *>, {0|-1}, keepdim=True{|, dtype=torch.float64})
torch.prod(<f *>, {0|-1})
torch.prod(<f *>)
torch.cumsum(<f *>, {0|-1})
torch.cumprod(<f *>, -1)
torch.norm(<f *>)
<f *>.norm({2|1}, -1)
torch.linalg.vector_norm(<f *>, {2|1})
torch.linalg.matrix_norm(<f ?,?>)
F.normalize(<f *>, dim=-1)
F.mse_loss(<f *>, <f =>)
F.l1_loss(<f *>, <f =>{|, reduction='none'})
F.smooth_l1_loss(<f *>, <f =>)
F.huber_loss(<f *>, <f =>)
F.binary_cross_entropy_with_logits(<f *>, <f =>)
F.cross_entropy(<f 4,8>, <k 4>{|, label_smoothing=0.1})
F.nll_loss(<f 4,8>, <k 4>)
F.kl_div(<f *>, <f =>, reduction='sum')
F.cosine_similarity(<f ...,8>, <f =>, dim=-1)
F.margin_ranking_loss(<f 4>, <f 4>, <f 4>)
F.triplet_margin_loss(<f 4,8>, <f 4,8>, <f 4,8>)
F.soft_margin_loss(<f *>, <f =>)
F.poisson_nll_loss(<f *>, <f =>)
F.hinge_embedding_loss(<f *>, <f =>)
torch.cdist(<f 4,8>, <f 4,8>)
torch.dist(<f *>, <f =>)
torch.logsumexp(<f *>, -1)
F.softplus(<f *>)
torch.{acos|asin|erfinv}(torch.tanh(<f *>) * 0.5)
torch.{sinh|cosh|tan}(<f *>)
F.interpolate(<f 2,4,6,6>, scale_factor=2, mode={'nearest'|'bilinear'|'bicubic'})
F.avg_pool3d(<f 1,2,4,4,4>, 2)
F.pad(<f 2,4,8>, (1, 1), mode={'reflect'|'replicate'})
torch.quantile(<f *>, 0.5)
torch.trace(<f 8,8>)
torch.fft.fft(<f ...,8>)
torch.fft.rfft(<f ...,8>)
torch.linalg.inv(<p 8,8>)
torch.linalg.solve(<p 8,8>, <f 8>)
torch.linalg.svdvals(<f 4,8>)
torch.polar(<f *>, <f =>)
torch.view_as_complex(<f 8,2>)
torch.cat([<f *>, <f =>], {0|-1})
torch.stack([<f *>, <f =>, <f =>])
torch.addcmul(<f *>, <f =>, <f =>, value=0.5)
torch.addcdiv(<f *>, <f =>, <p => + 4)
torch.atan2(<f *>, <f =>)
torch.cross(<f 4,3>, <f 4,3>, dim=-1)
torch.dot(<f 8>, <f 8>)
torch.vdot(<f 8>, <f 8>)
torch.index_put(<f 4,8>, (<k 3>,), <f 3,8>)
torch.scatter_add(<f 4,8>, 0, <k 4,8>, <f 4,8>)
F.grid_sample(<f 2,4,6,6>, <f 2,4,6,2>, align_corners=False)
"""

# How often a group is drawn from; allowed ops often enough that low precision spreads.
WEIGHTS = {
    "ALLOW": 34,
    "DENY": 16,
    "FOLLOW": 22,
    "VIEWS": 11,
    "WRITES": 6,
    "CASTS": 6,
    "OTHERS": 5,
}

ROWS = {
    group: tuple(text.strip().splitlines())
    for group, text in {"ALLOW": ALLOW, "DENY": DENY, **FOLLOWING}.items()
}

# Calls whose result has a shape that only its elements tell: nothing else is called with it.
SINKS = frozenset(
    row for rows in ROWS.values() for row in rows if re.search(r"\[<b|masked_select|bincount", row)
)
