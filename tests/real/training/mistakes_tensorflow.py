"""Variants of tensorflow2.py and keras_fit.py: mistakes that verify has to find, and right programs."""

from __future__ import annotations

from tests.real.training.variants import Variant

_COMPILED = "@tf.function  # type: ignore[untyped-decorator]\n"
_TAPE = "    tape = hvd.DistributedGradientTape(tape)\n"
_GRADIENTS = "    gradients = tape.gradient(loss, variables)\n"
_APPLY = "    optimizer.apply_gradients(zip(gradients, variables))  # noqa: B905\n"
_SHARD = "dataset = dataset.shard(hvd.size(), hvd.rank())\n"
_SAVE = "    if hvd.rank() == 0:\n        checkpoint.save"
_ADAM = "tf.keras.optimizers.Adam(0.01 * hvd.size())"
_SEED = "tf.keras.utils.set_random_seed(7 + hvd.rank())"
_WRAP = "optimizer = hvd.DistributedOptimizer(optimizer)\n"
_SHARE = "x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]\n"
_BROADCAST = "    hvd.callbacks.BroadcastGlobalVariablesCallback(0),\n"
_AVERAGE = "    hvd.callbacks.MetricAverageCallback(),\n"
_FIRST = "if hvd.rank() == 0:\n    callbacks"
# Files that ranks write at the same time raise exceptions now and then: here, rank 1 comes later.
_STAGGERED = "    __import__('time').sleep(2 * hvd.rank())\n"
_LATER = (
    "callbacks.append(tf.keras.callbacks.LambdaCallback(\n"
    "    on_epoch_end=lambda *_: __import__('time').sleep(2 * hvd.rank())))\n"
)
_DATA = "x, y, batch_size=16,"

WRONG = (
    Variant(
        "tensorflow2.py", "no init", (("hvd.init()\n", ""),), "program-init",
        says="before hvd.init()",
    ),
    Variant("tensorflow2.py", "plain tape", ((_TAPE, ""),), "program-gradients",
            says="never averaged"),
    Variant(
        "tensorflow2.py", "some variables left out",
        (("tf.GradientTape()", "tf.GradientTape(persistent=True)"),
         (_TAPE, "    shared = hvd.DistributedGradientTape(tape)\n"),
         (_GRADIENTS, "    gradients = shared.gradient(loss, variables[:2])\n"
          "    gradients += tape.gradient(loss, variables[2:])\n")),
        "program-gradients", says="2 of 4 parameters (sequential/dense_1/kernel", run=6,
    ),
    Variant("tensorflow2.py", "no broadcast", (("    if first_batch:", "    if False:"),),
            "program-start", says="no tensors were broadcast"),
    Variant(
        "tensorflow2.py", "broadcast before the model is built",
        (("    if first_batch:", "    if False:"),
         ("checkpoint = tf", "hvd.broadcast_variables(model.variables, root_rank=0)\ncheckpoint = tf")),
        "program-start", says="no tensors were broadcast",
    ),
    Variant("tensorflow2.py", "no shares", ((_SHARD, ""), (_SEED, "tf.keras.utils.set_random_seed(7)")),
            "program-data", says="the same batches"),
    Variant(
        "tensorflow2.py", "local rank to the shares",
        ((_SHARD, _SHARD.replace("hvd.rank()", "hvd.local_rank()")),),
        "program-data", says="local_rank()",
    ),
    Variant(
        "tensorflow2.py", "uneven shares",
        ((_SHARD, "dataset = dataset.skip(512 * hvd.rank()).take(400 + 64 * hvd.rank())\n"),),
        "program-steps", says="batches in a pass",
    ),
    Variant("tensorflow2.py", "all ranks save", ((_SAVE, _STAGGERED + _SAVE.replace("hvd.rank() == 0", "True")),),
            "program-checkpoint", says="rank 1 on"),
    Variant(
        "tensorflow2.py", "local rank 0 saves",
        ((_SAVE, _SAVE.replace("hvd.rank()", "hvd.local_rank()")),),
        "program-checkpoint", says="local_rank() decides", run=6,
    ),
    Variant("tensorflow2.py", "own metric", (('hvd.allreduce(loss, name="loss")', "loss"),),
            "program-metrics", "pass", "note", run=6),
    Variant("keras_fit.py", "not wrapped", ((_WRAP, ""),), "program-gradients", says="never averaged", run=8),
    Variant(
        "keras_fit.py", "state lost",
        ((_WRAP, "model.compile(optimizer, 'mse')\nmodel.fit(x[:16], y[:16], verbose=0)\n" + _WRAP),),
        "program-start", says="lost its state", run=7,
    ),
    Variant("keras_fit.py", "no broadcast", ((_BROADCAST, ""),), "program-start",
            says="no tensors were broadcast"),
    Variant("keras_fit.py", "no shares", ((_SHARE, ""), (_SEED, "tf.keras.utils.set_random_seed(7)")),
            "program-data", says="the same batches"),
    Variant(
        "keras_fit.py", "uneven shares",
        ((_SHARE, "x, y = x[: 400 + 64 * hvd.rank()], y[: 400 + 64 * hvd.rank()]\n"),),
        "program-steps", says="batches in a pass",
    ),
    Variant("keras_fit.py", "all ranks save", ((_FIRST, _LATER + _FIRST.replace("hvd.rank() == 0", "True")),),
            "program-checkpoint", says="rank 1 on"),
    Variant(
        "keras_fit.py", "local rank 0 saves",
        ((_FIRST, _FIRST.replace("hvd.rank()", "hvd.local_rank()")),),
        "program-checkpoint", says="local_rank() decides", run=8,
    ),
    Variant("keras_fit.py", "own metrics", ((_AVERAGE, ""),), "program-metrics", "pass", "note", run=8),
    Variant("keras_fit.py", "rate", (("0.01 * hvd.size()", "0.01"),), "program-rate", "pass", "note", run=8),
)  # fmt: skip

RIGHT = (
    Variant("tensorflow2.py", "as it is", ()),
    Variant(
        "tensorflow2.py", "averaged by hand",
        ((_TAPE, ""), (_APPLY, "    gradients = [hvd.allreduce(each) for each in gradients]\n" + _APPLY)),
    ),
    Variant(
        "tensorflow2.py", "averaged by hand, not compiled",
        ((_COMPILED, ""), (_TAPE, ""), ("    mean = hvd.allreduce(loss, name=\"loss\")\n", "    mean = loss\n"),
         (_APPLY, "    gradients = [hvd.allreduce(each) for each in gradients]\n"
          + _APPLY.replace("(zip", "(grads_and_vars=zip"))),
        "program-metrics", "pass", "note",
    ),
    Variant(
        "tensorflow2.py", "schedule",
        ((_ADAM, "tf.keras.optimizers.Adam(\n    tf.keras.optimizers.schedules.ExponentialDecay("
          "0.01 * hvd.size(), 10, 0.5))"),),
        "program-rate", "pass", "is 2 times that of one rank", run=6,
    ),
    Variant(
        "tensorflow2.py", "legacy optimizer",
        ((_ADAM, _ADAM.replace("Adam", "legacy.Adam")), ("optimizer.variables,", "optimizer.variables(),")),
        options=("--variant", "keras2"),
    ),
    Variant("keras_fit.py", "as it is", ()),
    Variant("keras_fit.py", "horovod.keras", (("import horovod.tensorflow.keras", "import horovod.keras"),)),
    Variant(
        "keras_fit.py", "data set",
        ((_DATA, "tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(99).batch(8),"
          " steps_per_epoch=500 // hvd.size(),"),),
    ),
    Variant(
        "keras_fit.py", "resumed",
        (("epochs=2", "epochs=3, initial_epoch=hvd.broadcast(1, root_rank=0)"),),
        "program-data", "pass", "(read in train.py:", run=8,
    ),
    Variant(
        "keras_fit.py", "accumulated",
        ((_WRAP, _WRAP.replace("(optimizer)", "(optimizer, backward_passes_per_step=2)")),),
    ),
    Variant(
        "keras_fit.py", "warm-up",
        ((_AVERAGE, _AVERAGE + "    hvd.callbacks.LearningRateWarmupCallback(\n"
          "        0.01 * hvd.size(), warmup_epochs=1, momentum_correction=False),\n"),),
        "program-rate", "pass", "a warm-up",
    ),
    Variant(
        "keras_fit.py", "validated", ((_DATA, _DATA + " validation_data=(x[:64], y[:64]),"),),
    ),
)  # fmt: skip
