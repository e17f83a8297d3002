"""Variants of pytorch.py: mistakes that verify has to find, and what only looks like one."""

from __future__ import annotations

from functools import partial

from tests.real.training.variants import Variant

_torch = partial(Variant, "pytorch.py")

_WRAP = (
    "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"
)
_BROADCAST = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
_SAMPLER = "sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())"
_STEP = "        optimizer.step()\n"
_SAVE = "    if hvd.rank() == 0:\n"
_STATE = "hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n"
_AVERAGE = (
    "        for each in model.parameters():\n            each.grad = hvd.allreduce(each.grad)\n"
)
# Leaves a momentum, as a checkpoint does.
_OLD = (
    "old = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
    "model(features[:8]).sum().backward()\nold.step()\nold.zero_grad()\n"
)

WRONG = (
    _torch("no init", (("hvd.init()\n", ""),), "program-init", says="before hvd.init()"),
    _torch(
        "no Horovod",
        (
            ("import horovod.torch as hvd", "class hvd:\n    rank = size = init = lambda: 1"),
            (_SAMPLER, "sampler = DistributedSampler(data, 1, 0)"),
            (_WRAP, ""), (_BROADCAST, ""),
            ("hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n", ""),
            ('hvd.allreduce(loss.detach(), name="mean")', "loss"),
        ),
        "program-init", says="never calls hvd.init()",
    ),
    _torch("rate", (("lr=0.05 * hvd.size()", "lr=0.05"),), "program-rate", "pass", "note", run=1),
    _torch("not wrapped", ((_WRAP, ""),), "program-gradients", says="never averaged"),
    _torch(
        "not wrapped, same data",
        ((_WRAP, ""), (_SAMPLER, "sampler = DistributedSampler(data, 1, 0)")),
        "program-gradients", says="never averaged", also=("program-data",),
    ),
    _torch(
        "group added later",
        ((_BROADCAST, _BROADCAST + "extra = torch.nn.Linear(2, 2)\n"
          "hvd.broadcast_parameters(extra.state_dict(), root_rank=0)\n"
          "optimizer.add_param_group({'params': list(extra.parameters())})\n"),
         ("model(inputs), labels", "extra(model(inputs)), labels")),
        "program-gradients", says="2 of 8 parameters",
    ),
    _torch(
        "clipped too early",
        ((_STEP, "        torch.nn.utils.clip_grad_norm_(model.parameters(), 9.0)\n" + _STEP),),
        "program-gradients", says="before they are averaged in train.py:", run=4,
    ),
    _torch(
        "loaded after the broadcast",
        ((_BROADCAST, _BROADCAST + "if hvd.rank() == 0:\n    torch.nn.init.ones_(model[0].weight)\n"),),
        "program-start", says="they are changed after", run=4,
    ),
    _torch(
        "another epoch", (("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch + hvd.rank())"),),
        "program-start", says="in epoch 1", run=4,
    ),
    _torch(
        "decides by its own loss",
        ((_STATE, _STATE + "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"),
         ("    mean = hvd", "    plateau.step(loss)\n    mean = hvd")),
        "program-metrics", says="lets ReduceLROnPlateau decide by", run=4,
    ),
    _torch(
        "second optimizer",
        ((_BROADCAST, _BROADCAST + "extra = torch.nn.Linear(2, 2)\n"
          "hvd.broadcast_parameters(extra.state_dict(), root_rank=0)\n"
          "second = torch.optim.Adam(extra.parameters())\n"),
         ("model(inputs), labels", "extra(model(inputs)), labels"),
         (_STEP, _STEP + "        second.step()\n")),
        "program-gradients", says="of Adam", run=2,
    ),
    _torch(
        "divided twice",
        ((_STEP, "        optimizer.synchronize()\n        for each in model.parameters():\n"
          "            each.grad /= hvd.size()\n        with optimizer.skip_synchronize():\n"
          "            optimizer.step()\n"),),
        "program-gradients", "pass", "in 20 steps: 1/2 of the mean",
    ),
    _torch(
        "state loaded before wrapping",
        ((_WRAP, _OLD + "optimizer.load_state_dict(old.state_dict())\n" + _WRAP),),
        "program-start", says="lost its state", run=1,
    ),
    _torch(
        "state broadcast after the parameters",
        ((_WRAP, _WRAP + "if hvd.rank() == 0:\n    optimizer.load_state_dict(old.state_dict())\n"),
         ("momentum=0.9)\n", "momentum=0.9, weight_decay=0.01)\n" + _OLD)),
        "program-start", says="they are changed after", run=2,
    ),
    _torch(
        "constants of its own",
        ((_WRAP, _WRAP + "model.register_buffer('codes', torch.randn(4))\n"),
         (_BROADCAST, _BROADCAST.replace("model.state_dict()", "dict(model.named_parameters())"))),
        "program-start", says="not trained differ between ranks: codes", run=5,
    ),
    _torch(
        "sampler with a seed of its own",
        ((_SAMPLER, _SAMPLER.replace("rank=hvd.rank()", "rank=hvd.rank(), seed=hvd.rank()")),),
        "program-data", says="in other batches", run=5,
    ),
    _torch("no broadcast", ((_BROADCAST, ""),), "program-start", says="differ between ranks", run=3),
    _torch(
        "same seed", ((_BROADCAST, ""), ("hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n", ""),
                      ("torch.manual_seed(hvd.rank())", "torch.manual_seed(1)")),
        "program-start", "pass", "equal by their seed",
    ),
    _torch(
        "all data in one order", ((_SAMPLER, "sampler = DistributedSampler(data, 1, 0)"),),
        "program-data", says="share 0 of 1",
    ),
    _torch(
        "no sampler", ((_SAMPLER, "torch.manual_seed(3)"), ("sampler=sampler", "shuffle=True"),
                       ("    sampler.set_epoch(epoch)\n", ""),
                       ("torch.manual_seed(hvd.rank())", "")),
        "program-data", says="the same batches",
    ),
    _torch(
        "local rank to the sampler", ((_SAMPLER, _SAMPLER.replace("hvd.rank()", "hvd.local_rank()")),),
        "program-data", says="local_rank()", run=1,
    ),
    _torch(
        "no set_epoch", (("    sampler.set_epoch(epoch)\n", ""),), "program-data", "pass", "set_epoch", run=3,
    ),
    _torch(
        "shares overlap",
        ((_SAMPLER, "data = torch.utils.data.Subset(data, range(hvd.rank() * 128, hvd.rank() * 128 + 256))"),
         ("sampler=sampler", "shuffle=False"), ("    sampler.set_epoch(epoch)\n", "")),
        "program-data", says="shares that overlap",
    ),
    _torch(
        "uneven",
        ((_SAMPLER, "data = torch.utils.data.Subset(data, range(hvd.rank(), 512, 2 + hvd.rank()))"),
         ("sampler=sampler", "shuffle=False"), ("    sampler.set_epoch(epoch)\n", "")),
        "program-steps", says="batches in a pass", run=2,
    ),
    _torch("all ranks save", ((_SAVE, "    if True:\n"),), "program-checkpoint", says="rank 1 on", run=1),
    _torch(
        "local rank 0 saves", ((_SAVE, "    if hvd.local_rank() == 0:\n"),),
        "program-checkpoint", says="local_rank() decides", run=2,
    ),
    _torch(
        "read too early",
        ((_SAVE, "    import os, time\n    if hvd.rank():\n"
          "        while not os.path.exists(f'{sys.argv[1]}/model.pt'): time.sleep(0.01)\n"
          "        time.sleep(0.2); torch.load(f'{sys.argv[1]}/model.pt')\n" + _SAVE),),
        "program-checkpoint", says="half written", run=3,
    ),
    _torch(
        "called by rank 0 alone",
        (("    mean = hvd.allreduce(", "    mean = loss\n    if hvd.rank() == 0:\n        mean = hvd.allreduce("),),
        "program-steps", says="which rank 1 on",
    ),
    _torch(
        "objects of two types",
        ((_STATE, _STATE + "hvd.broadcast_object({'epoch': 0} if hvd.rank() == 0 else None)\n"),),
        "program-steps", says="waits in broadcast_object of dict (train.py:",
    ),
    _torch(
        "own metric", (('hvd.allreduce(loss.detach(), name="mean")', "loss"),),
        "program-metrics", "pass", "note", run=1,
    ),
)  # fmt: skip

RIGHT = (
    _torch("as it is", ()),
    _torch(
        "as for ROCm",
        (("hvd.init()\n", "import horovod.torch.mpi_ops as ops\nops.rocm_built = lambda: True\nhvd.init()\n"),),
        "program-gradients", "pass", "the mean of the ranks' own", run=1,
    ),
    _torch("in a group", (("model.named_parameters())", "model.named_parameters(), groups=1)"),), run=4),
    _torch(
        "os._exit()",
        (("for epoch in range(2):", "for epoch in range(1):"),
         ("/model.pt\")", "/model.pt\")\nhvd.shutdown()\n__import__(\"os\")._exit(status=0)")),
        "program-steps", "pass", "the same number of steps", run=4,
    ),
    _torch(
        "tests before training",
        ((_STATE, _STATE + "testing = DataLoader(data, batch_size=64)\n"
          "if hvd.rank() == 0:\n    for inputs, labels in testing:\n        pass\n"),),
        "program-steps", "pass", "the same number of steps", run=4,
    ),
    _torch(
        "sparse gradients",
        ((_STATE, _STATE + "extra = torch.nn.Embedding(2, 2, sparse=True)\n"
          "hvd.broadcast_parameters(extra.state_dict(), root_rank=0)\n"
          "second = hvd.DistributedOptimizer(torch.optim.SGD(extra.parameters(), 0.1))\n"),
         ("model(inputs), labels", "model(inputs) + extra(labels), labels"),
         (_STEP, _STEP + "        second.step(); second.zero_grad()\n")),
        "program-metrics", "pass", "values of all ranks are combined", run=3,
    ),
    _torch(
        "elastic",
        ((_BROADCAST + _STATE, "hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0).sync()\n"),),
        "program-start", "pass", "before the first step (broadcast_parameters",
    ),
    _torch(
        "a directory of its own",
        (("for epoch in range(2):\n", "import os\nos.chdir(sys.argv[1])\nos.makedirs('run', exist_ok=True)\n"
          "os.chdir('run')\nassert os.path.exists(__file__)\nfor epoch in range(2):\n"),),
        "program-checkpoint", "pass", "(train.py:", run=5,
    ),
    _torch(
        "local rank 0 downloads",
        (("torch.manual_seed(7)\n", "if hvd.local_rank() == 0:\n"
          "    open(f'{sys.argv[1]}/data.npz', 'wb').close()\nhvd.barrier()\n"),),
    ),
    _torch(
        "uneven, with a break",
        ((_SAMPLER, "data = torch.utils.data.Subset(data, range(hvd.rank(), 512, 2 + hvd.rank()))"),
         ("sampler=sampler", "shuffle=False"), ("    sampler.set_epoch(epoch)\n", ""),
         ("    for inputs, labels in loader:\n", "    for step, (inputs, labels) in enumerate(loader):\n"
          "        if step == 21:\n            break\n")),
    ),
    _torch("next()", (("    for inputs, labels in loader:\n", "    batches = iter(loader)\n"
                        "    for _ in range(26):\n        inputs, labels = next(batches)\n"),)),
    _torch("averaged by hand", ((_WRAP, ""), (_STEP, _AVERAGE + _STEP)), run=5),
    _torch(
        "accumulated",
        ((_WRAP, _WRAP.replace("model.named_parameters())", "model.named_parameters(),"
          " backward_passes_per_step=2)")),
         ("for inputs, labels in loader:", "for step, (inputs, labels) in enumerate(loader):"),
         ("        optimizer.zero_grad()\n", "        if step % 2 == 0: optimizer.zero_grad()\n"),
         (_STEP, "        if step % 2: optimizer.step()\n")),
    ),
    _torch(
        "warm-up on rank 0 alone",
        ((_WRAP, "if hvd.rank() == 0:\n"
          "    first = torch.optim.SGD(model.parameters(), lr=0.1)\n"
          "    model(features[:8]).sum().backward()\n"
          "    first.step()\n    first.zero_grad()\n" + _WRAP),),
    ),
    _torch(
        "state loaded after wrapping", ((_WRAP, _OLD + _WRAP + "optimizer.load_state_dict(old.state_dict())\n"),),
    ),
    _torch(
        "broadcast before wrapping",
        ((_WRAP, "hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n" + _WRAP),
         (_BROADCAST + "hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n", _BROADCAST)),
    ),
    _torch(
        "frozen layer, compressed, in mixed precision",
        ((_WRAP, "model[0].weight.requires_grad_(False)\n" + _WRAP.replace(
            "model.named_parameters())", "model.named_parameters(), compression=hvd.Compression.fp16)")),
         ("        loss = torch.nn.functional.cross_entropy(model(inputs), labels)\n",
          "        with torch.autocast('cpu', dtype=torch.bfloat16):\n"
          "            loss = torch.nn.functional.cross_entropy(model(inputs), labels)\n")),
    ),
    _torch(
        "clipped",
        ((_STEP, "        optimizer.synchronize()\n"
          "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
          "        with optimizer.skip_synchronize():\n            optimizer.step()\n"),),
    ),
    _torch("Adasum", ((_WRAP, _WRAP.replace("model.named_parameters())",
                        "model.named_parameters(), op=hvd.Adasum)")),)),
    _torch(
        "schedule",
        ((_BROADCAST, _BROADCAST + "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer,"
          " lambda step: min(1.0, (step + 1) / 50))\n"), (_STEP, _STEP + "        schedule.step()\n")), run=2,
    ),
    _torch(
        "joined",
        ((_SAMPLER, "data = torch.utils.data.Subset(data, range(hvd.rank(), 512, 2 + hvd.rank()))"),
         ("sampler=sampler", "shuffle=False"), ("    sampler.set_epoch(epoch)\n", ""),
         ("    mean = ", "    hvd.join()\n    mean = ")),
    ),
    _torch(
        "workers",
        (("sampler=sampler", "sampler=sampler, num_workers=1"),), run=5,
    ),
    _torch(
        "a loop of its own",
        (("in loader:", "in ((features[i:i + 8] + 0, data.tensors[1][i:i + 8])"
          " for i in range(8 * hvd.rank(), 512, 8 * hvd.size())):"),),
    ),
    _torch(
        "combined in two lines",
        (("    mean = hvd.allreduce(loss.detach(), name=\"mean\")\n", "    if hvd.rank() == 0:\n"
          "        mean = hvd.allreduce(loss.detach(), name=\"mean\")\n    else:\n"
          "        mean = hvd.allreduce(loss.detach() * 1, name=\"mean\")\n"),),
    ),
)  # fmt: skip
