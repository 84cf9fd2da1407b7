"""Rows of random programs whose ops no list names: they follow their inputs, or are casts."""

FOLLOW = """
<f *> {+|-|*} <f =>
torch.{add|sub|mul}(<f *>, <f =>)
<f *> / (<f =>.abs() + 1)
<f *> {+|*} {2|0.5|-1}
torch.add(<f *>, <f =>, alpha=0.5)
{0.5|2} - <f *>
<f *> + <f 8>
<f ...,8> * <f 8>
torch.{relu|tanh|sigmoid|sin|cos|erf|abs|neg|square|floor|sign|round|trunc|atan|sinc}(<f *>)
F.{relu|gelu|silu|elu|mish|leaky_relu|selu}(<f *>)
F.{hardtanh|hardswish|hardsigmoid|logsigmoid|softsign}(<f *>)
F.gelu(<f *>, approximate='tanh')
F.glu(<f ...,8>)
<f *>.{relu|tanh|sigmoid|abs|exp|neg}()
torch.clamp(<f *>, -1, {1|0.5})
torch.where(<b *>, <f =>, {<f =>|0.0})
torch.where(<f *> > 0, <f =>, <f =>)
<f *>.masked_fill(<b =>, {0.0|-1.5})
torch.{maximum|minimum|fmod|hypot}(<f *>, <f =>)
torch.logaddexp(<f *>, <f =>)
torch.lerp(<f *>, <f =>, {0.3|<f =>})
<f *>.mean({|-1|0})
torch.var(<f *>, -1)
<f *>.std()
torch.var_mean(<f *>, -1)
<f *>.amax(-1)
torch.max(<f *>)
torch.max(<f *>, -1)
torch.min(<f *>, 0)
torch.median(<f *>, -1)
torch.topk(<f *>, 2)
torch.sort(<f *>, -1)
torch.aminmax(<f *>)
torch.cummax(<f *>, -1)
torch.frexp(<f *>)
torch.argmax(<f *>, -1)
torch.count_nonzero(<f *>)
F.dropout(<f *>, {0.1|0.5}, training=True)
F.embedding(<k 4>, <f 4,8>)
torch.gather(<f 4,8>, 1, <k 4,8>)
torch.index_select(<f ...,8>, 0, <k 2>)
torch.take_along_dim(<f 4,8>, <k 4,8>, 1)
torch.scatter(<f 4,8>, 0, <k 4,8>, {<f 4,8>|0.5})
torch.scatter_reduce(<f 4,8>, 0, <k 4,8>, <f 4,8>, 'amax')
torch.index_add(<f 4,8>, 0, <k 3>, <f 3,8>)
torch.index_copy(<f 4,8>, 0, <k 4>, <f 4,8>)
torch.index_fill(<f 4,8>, 0, <k 2>, 1.5)
<f 4,8>[<k 3>]
<f 4,8>[<b =>]
torch.masked_select(<f *>, <b =>)
torch.{tril|triu}(<f 4,8>)
torch.flip(<f *>, (-1,))
torch.roll(<f *>, 1, -1)
<f *>.repeat_interleave(2, -1)
torch.tile(<f 4,8>, (1, 2))
torch.kron(<f 4>, <f 8>)
torch.diff(<f *>)
torch.diag_embed(<f 4,8>)
F.pad(<f *>, (1, 1), value=0.5)
F.avg_pool2d(<f 2,4,6,6>, 2)
F.max_pool2d(<f 2,4,6,6>, 2{|, return_indices=True})
F.adaptive_avg_pool2d(<f 2,4,6,6>, 3)
F.pixel_shuffle(<f 2,4,6,6>, 2)
F.unfold(<f 2,4,6,6>, 3)
F.one_hot(<k 4>, 4)
torch.nan_to_num(<f *>)
torch.isfinite(<f *>)
<f *>.clone()
torch.zeros_like(<f *>)
torch.full_like(<f *>, 0.5)
torch.rand_like(<f *>)
<f *>.new_zeros(<shape>)
make(torch.ones, <shape>)
make(torch.full, (<shape>,), 0.25, dtype={torch.bfloat16|torch.float32|torch.float64})
make(torch.arange, 8.0)
torch.broadcast_tensors(<f 4,8>, <f 8>)
torch.meshgrid(<f 4>, <f 8>, indexing='ij')
"""

VIEWS = """
<f ...,8>.view(-1, 8)
<f *>.reshape(-1)
<f 4,8>.view(8, 4)
<f 2,4,6,6>.flatten(1)
<f ...,8>.unflatten(-1, (2, 4))
<f *>.unsqueeze({0|-1})
<f *>.unsqueeze(0).squeeze(0)
<f ?,?>.t()
make(getattr, <f ?,?>, 'T')
make(getattr, <f ...,8>, 'mT')
torch.transpose(<f ...,8>, 0, -1)
<f 2,4,8>.permute(1, 0, 2)
torch.movedim(<f ...,8>, 0, -1)
<f 8>.expand(4, 8)
<f ...,8>[0]
<f ...,8>[..., 1:]
<f ...,8>[..., :4]
<f ...,8>[:, None]
<f ...,8>.narrow(-1, 2, 4)
<f ...,8>.select(-1, 3)
<f ...,8>.chunk({2|4}, -1)
torch.split(<f ...,8>, {4|[2, 6]}, -1)
torch.unbind(<f ?,8>)
torch.tensor_split(<f ...,8>, 2, -1)
<f ?,?>.diagonal()
<f ...,8>.unfold(-1, 4, 2)
<f *>.contiguous()
<f *>.transpose(0, -1).contiguous()
<f *>.detach()
<f *>.view_as(<f =>)
<f 8,8>.swapaxes(0, 1)
"""

WRITES = """
<w *>.add_(<f =>)
<w *>.mul_({0.5|<f =>})
<w *>.sub_(<f =>, alpha=0.5)
<w *>.relu_()
torch.sigmoid_(<w *>)
<w *>.clamp_(-1, 1)
<w *>.copy_(<f =>)
<w *>.masked_fill_(<b =>, 0.5)
<w *>.fill_(0.5)
<w *>.zero_()
<w 4,8>.addmm_(<f 4,8>, <f 8,8>)
<w 4,8>.addcmul_(<f 4,8>, <f 4,8>)
<w 4,8>.index_put_((<k 3>,), <f 3,8>)
<w 4,8>.scatter_add_(0, <k 4,8>, <f 4,8>)
<w 4,8>.index_add_(0, <k 3>, <f 3,8>)
<w 4,8>.lerp_(<f 4,8>, 0.5)
F.relu(<w *>, inplace=True)
F.dropout(<w *>, 0.5, training=True, inplace=True)
<w *>.t_()
<w *>.unsqueeze_(0)
<w ...,8>.select(-1, 0).add_(1)
<w ...,8>[..., 2:4].mul_(2)
make(operator.iadd, <w *>, <f =>)
make(operator.imul, <w *>, 0.5)
make(operator.setitem, <w ...,8>, 0, 0.5)
make(operator.setitem, <w 4,8>, <b =>, 0.5)
make(operator.setitem, <w 4,8>, slice(1, 3), <f 2,8>)
torch.add(<f *>, <f =>, out=<o =>)
torch.mm(<f 4,8>, <f 8,8>, out=<o 4,8>)
torch.exp(<f *>, out=<o =>)
torch.matmul(<f 4,8>, <f 8,8>, out=<o 4,8>)
torch.softmax(<f *>, -1, out=<o =>)
"""

CASTS = """
<f *>.float()
<f *>.bfloat16()
<f *>.half()
<f *>.double()
<f *>.to({torch.bfloat16|torch.float32|torch.float64|torch.float16})
<f *>.to(torch.float32, copy=True)
<f *>.type({torch.float32|torch.bfloat16})
<f *>.type_as(<f =>)
<f *>.to(<f =>)
<f *>.float().view(-1)
<f *>.long()
<f *>.bool()
<i *>.float()
<i *>.to(torch.bfloat16)
<b *>.float()
"""

OTHERS = """
<i *> + {1|2}
<i *> * <i =>
<i *>.sum()
<f *> * <i =>
<f *> {>|<=|==} {0|<f =>}
<b *> & <b =>
<b *>.logical_not()
torch.any(<b *>)
torch.cumsum(<i *>, 0)
torch.bincount(<k 8>)
<c *>.abs()
<c *> * <c =>
make(getattr, <c *>, 'real')
torch.view_as_real(<c *>)
torch.sum(<c *>)
<c *> * <f =>
<d *> + <f =>
<d *> * <d =>
<d 4,8> @ <d 8,8>
torch.softmax(<d *>, -1)
F.layer_norm(<d 4,8>, (8,))
<d *>.sum()
<d *>.float()
F.linear(<d 4,8>, <d 8,8>)
torch.cat([<d *>, <f =>])
F.mse_loss(<d *>, <f =>)
"""

FOLLOWING = {
    "FOLLOW": FOLLOW,
    "VIEWS": VIEWS,
    "WRITES": WRITES,
    "CASTS": CASTS,
    "OTHERS": OTHERS,
}
