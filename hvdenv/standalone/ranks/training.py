"""The exercise ``training``: a small model, trained as scripts train with Horovod.

The model is linear and the data come from a fixed seed. Every rank starts with its own random
parameters, which reveals a broadcast without effect. Each rank also computes the result of one
process on the joined batches of all ranks, with numpy and without Horovod, and a bound for
rounding errors. The bound can be computed because the loss is quadratic (see errors_at_end).

Each part reports one events.Training. Runs on Python 3.6 and newer with numpy, which the
frameworks require.
"""

import hashlib
import importlib
import os
import shutil
import tempfile
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Tuple

import events
from context import Array, Context

Data = Tuple[Array, Array]
Step = Tuple[float, Array]
Part = Callable[[Context], Dict[str, Any]]

FEATURES, OUTPUTS = 7, 3
PER_RANK, BATCH = 12, 4
EPOCHS, WARMUP_EPOCHS, KERAS_EPOCHS = 4, 1, 2
# RATE is size * base, as in scripts. Products with powers of two are exact, so that processors
# with and without fused multiply-add give the same bits.
RATE, MOMENTUM = 0.25, 0.5
# Half the relative distance of neighbouring numbers.
FLOAT32, FLOAT16 = 2.0**-24, 2.0**-11
# The latest version of Horovod, which supports Keras 2 only unless it is patched.
LAST_RELEASE = (0, 28, 1)


class Plan(NamedTuple):
    """A training that one process computes.

    Attributes:
        steps: learning rate and numbers of the samples, a row for each rank.
        starts: parameters of each rank in the first step, after which all have rank 0's.
        velocity: of the momentum, at the start.
        factor: averaged gradients are multiplied by it.
        half: whether gradients are exchanged as float16.
    """

    data: Data
    steps: List[Step]
    starts: Array
    velocity: Array
    momentum: float
    factor: float
    half: bool


def make_data(numpy: Any, size: int) -> Data:
    """Inputs and targets of all samples; the last input is 1 for the bias."""
    source = numpy.random.RandomState(0)
    inputs = source.uniform(-2, 2, (PER_RANK * size, FEATURES + 1))
    inputs[:, -1] = 1
    targets = inputs @ source.uniform(-1, 1, (FEATURES + 1, OUTPUTS))
    targets += source.uniform(-0.1, 0.1, targets.shape)
    return inputs.astype("float32"), targets.astype("float32")


def random_values(numpy: Any, rank: int, kind: str) -> Array:
    """The ``parameters`` or ``velocity`` that a rank starts with; the last row is the bias."""
    source = numpy.random.RandomState(2 * rank + (kind == "velocity"))
    return source.uniform(-1, 1, (FEATURES + 1, OUTPUTS)).astype("float32")


def beginning(numpy: Any, size: int) -> Tuple[Array, Array]:
    """Parameters of all ranks and velocity after the broadcasts from rank 0."""
    parameters = random_values(numpy, 0, "parameters")
    return numpy.stack([parameters] * size), random_values(numpy, 0, "velocity")


def steps_of(numpy: Any, order: Iterable[int], size: int, rates: List[float]) -> List[Step]:
    """The steps of a plan.

    Args:
        numpy: the module.
        order: numbers of all samples; rank r gets those at r, r + size and so on.
        size: the number of ranks.
        rates: learning rate of each step; samples repeat after the last one.
    """
    rows = numpy.array(order).reshape(PER_RANK, size).T
    batches = [rows[:, at : at + BATCH] for at in range(0, PER_RANK, BATCH)]
    return [(rate, batches[step % len(batches)]) for step, rate in enumerate(rates)]


def one_process(numpy: Any, plan: Plan) -> Tuple[Array, float]:
    """The parameters of one process in float64, and how far those of ranks may differ."""
    inputs, targets = (array.astype("float64") for array in plan.data)
    weights, velocity, errors = plan.starts.astype("float64"), plan.velocity, []
    for rate, rows in plan.steps:
        x, y = inputs[rows], targets[rows]
        turned = plan.factor * 2.0 / (BATCH * OUTPUTS) * x.swapaxes(1, 2)
        gradients = turned @ (x @ weights - y)
        terms = (abs(turned) @ (abs(x) @ abs(weights) + abs(y))).mean(axis=0)
        velocity = plan.momentum * velocity + gradients.mean(axis=0)
        weights = (weights[0] if weights.ndim == 3 else weights) - rate * velocity
        # The error of a sum of n terms is at most n roundings of the sum of their magnitudes.
        error = FLOAT32 * ((FEATURES + BATCH + len(rows) + 10) * terms + 2 * abs(velocity))
        if plan.half:
            error += (len(rows) + 3) * (FLOAT16 * abs(gradients).mean(axis=0) + 2.0**-24)
        hessian = (turned @ x).mean(axis=0)
        norms = numpy.linalg.norm(error), 2 * FLOAT32 * numpy.linalg.norm(weights)
        errors.append((rate, hessian) + norms)
    return weights, errors_at_end(numpy, errors, plan.momentum)


def errors_at_end(
    numpy: Any, errors: List[Tuple[float, Array, float, float]], momentum: float
) -> float:
    """A bound for the errors of all steps in the parameters at the end.

    From the end backwards, `carry` is the matrix that propagates an error in parameters and
    velocity to the end: a step of gradient descent on a quadratic loss is linear.

    Args:
        numpy: the module.
        errors: for each step the learning rate, the Hessian of the loss, and the norms of the
            step's errors in the velocity and in the parameters.
        momentum: of the optimizer.
    """
    one = numpy.eye(FEATURES + 1)
    carry = numpy.hstack([one, 0 * one])
    total = 0.0
    for rate, hessian, in_velocity, in_parameters in reversed(errors):
        total += numpy.linalg.norm(carry[:, : FEATURES + 1], 2) * in_parameters
        total += numpy.linalg.norm(carry @ numpy.vstack([-rate * one, one]), 2) * in_velocity
        step = [[one - rate * hessian, -rate * momentum * one], [hessian, momentum * one]]
        carry = carry @ numpy.block(step)
    return float(total)


def compare(numpy: Any, plan: Plan, rank: int, got: Array) -> Dict[str, Any]:
    """Compare this rank's parameters with those of one process."""
    wanted, bound = one_process(numpy, plan)
    difference = float(abs(got - wanted).max())
    facts: Dict[str, Any] = {"difference": difference, "bound": bound, "steps": len(plan.steps)}
    if not difference <= bound:
        own = [(rate, rows[rank : rank + 1]) for rate, rows in plan.steps]
        others = {
            "gradients were added and not averaged": plan._replace(factor=float(len(plan.starts))),
            "it had trained alone": plan._replace(steps=own, starts=plan.starts[rank : rank + 1]),
        }
        for what, other in others.items():
            wanted, bound = one_process(numpy, other)
            if abs(got - wanted).max() <= bound:
                facts["like"] = what
    return facts


def digest(*arrays: Array) -> str:
    """A checksum of all bits of arrays."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def checkpoint(
    context: Context, save: Callable[[str], object], load: Callable[[str], bool]
) -> Dict[str, Any]:
    """Let rank 0 save and load a checkpoint.

    Args:
        context: the rank's.
        save: writes to a path.
        load: reads from the path, and returns whether the result is the same.
    """
    folder = tempfile.mkdtemp(prefix="hvdenv-training-")
    try:
        same = None
        if context.hvd.rank() == 0:
            save(os.path.join(folder, "checkpoint"))
            same = load(os.path.join(folder, "checkpoint"))
        return {"files": len(os.listdir(folder)), "same": same}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def torch_split(context: Context, values: Array) -> Tuple[Any, Any]:
    """Weight and bias from one array."""
    return context.tensor(values[:-1].T.copy()), context.tensor(values[-1].copy())


def torch_joined(context: Context, weight: Any, bias: Any) -> Array:
    """One array of weight and bias."""
    import numpy

    return numpy.vstack([context.array(weight.detach()).T, context.array(bias.detach())])


def torch_model(context: Context, compression: Any) -> Tuple[Any, Any, Dict[str, str]]:
    """A model and its optimizer after Horovod's broadcasts, and their checksums."""
    import numpy

    torch, hvd = context.native, context.hvd
    rank = hvd.rank()
    model = torch.nn.Linear(FEATURES, OUTPUTS).to(context.device or "cpu")
    parameters = (model.weight, model.bias)
    values = torch_split(context, random_values(numpy, rank, "parameters"))
    with torch.no_grad():
        for index, parameter in enumerate(parameters):
            parameter.copy_(values[index])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE / (1 + rank), momentum=MOMENTUM),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    # As if training continued from a checkpoint.
    values = torch_split(context, random_values(numpy, rank, "velocity"))
    for index, parameter in enumerate(parameters):
        optimizer.state[parameter]["momentum_buffer"] = values[index]
        # Horovod copies float16 results into the existing gradient. In older versions of torch
        # that fails for gradients from backward(). Broadcasts of new optimizers leave zeros, too.
        parameter.grad = torch.zeros_like(parameter)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
    return (
        model,
        optimizer,
        {
            "parameters after broadcast_parameters": digest(torch_joined(context, *parameters)),
            "state after broadcast_optimizer_state": digest(torch_joined(context, *state)),
        },
    )


def torch_data(context: Context, data: Data) -> Tuple[Any, Any, Any]:
    """The data set with numbers of samples, and two samplers: this rank's and a single process's."""
    torch, hvd = context.native, context.hvd
    dataset = torch.utils.data.TensorDataset(
        torch.arange(len(data[0])), context.tensor(data[0][:, :-1].copy()), context.tensor(data[1])
    )
    sampler = torch.utils.data.distributed.DistributedSampler
    own = sampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    return dataset, own, sampler(dataset, num_replicas=1, rank=0)


def train_torch(context: Context, compression: Any) -> Dict[str, Any]:
    """hvd.DistributedOptimizer, both broadcasts, and a DistributedSampler."""
    import numpy

    torch, hvd = context.native, context.hvd
    size = hvd.size()
    model, optimizer, checksums = torch_model(context, compression)
    data = make_data(numpy, size)
    dataset, own, everything = torch_data(context, data)
    loss_of = torch.nn.MSELoss()

    def measure(name: str) -> List[float]:
        _, x, y = dataset[sorted(own)]
        loss = loss_of(model(x), y).detach()
        return [float(loss), float(hvd.allreduce(loss, name="training." + name))]

    first = measure("first")
    steps: List[Step] = []
    seen: List[List[int]] = []
    for epoch in range(EPOCHS):
        own.set_epoch(epoch)
        everything.set_epoch(epoch)
        steps += steps_of(numpy, list(everything), size, [RATE] * (PER_RANK // BATCH))
        seen.append([])
        for numbers, x, y in torch.utils.data.DataLoader(dataset, BATCH, sampler=own):
            seen[-1] += numbers.tolist()
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    last = measure("last")
    got = torch_joined(context, model.weight, model.bias)
    checksums["parameters at the end"] = digest(got)

    def load(path: str) -> bool:
        saved = torch.load(path)
        return digest(torch_joined(context, saved["weight"], saved["bias"])) == digest(got)

    half = compression is not hvd.Compression.none
    plan = Plan(data, steps, *beginning(numpy, size), momentum=MOMENTUM, factor=1.0, half=half)
    return dict(
        checkpoint(context, lambda path: torch.save(model.state_dict(), path), load),
        losses=[first[1], last[1]],
        metrics={"loss": last},
        seen=seen,
        samples=len(dataset),
        checksums=checksums,
        rate=optimizer.param_groups[0]["lr"],
        rate_wanted=RATE,
        **compare(numpy, plan, hvd.rank(), got),
    )


def torch_plain(context: Context) -> Dict[str, Any]:
    """Gradients are exchanged as float32."""
    return train_torch(context, context.hvd.Compression.none)


def torch_half(context: Context) -> Dict[str, Any]:
    """Gradients are exchanged as float16."""
    return train_torch(context, context.hvd.Compression.fp16)


def tensorflow_data(context: Context, data: Data) -> Any:
    """This rank's share of the data set, with numbers of samples."""
    dataset = context.native.data.Dataset
    numbers = context.native.range(len(data[0]))
    slices = dataset.from_tensor_slices((numbers, data[0][:, :-1].copy(), data[1]))
    return slices.shard(context.hvd.size(), context.hvd.rank())


def tape(context: Context) -> Dict[str, Any]:
    """hvd.DistributedGradientTape and broadcast_variables, without Keras, whose versions differ."""
    import numpy

    tensorflow, hvd = context.native, context.hvd
    rank, size = hvd.rank(), hvd.size()

    def variables(kind: str) -> List[Any]:
        values = random_values(numpy, rank, kind)
        return [tensorflow.Variable(values[:-1]), tensorflow.Variable(values[-1])]

    def joined(pair: List[Any]) -> Array:
        return numpy.vstack([context.array(one) for one in pair])

    weights, velocity = variables("parameters"), variables("velocity")
    hvd.broadcast_variables(weights + velocity, root_rank=0)
    checksums = {"variables after broadcast_variables": digest(joined(weights), joined(velocity))}
    data = make_data(numpy, size)
    shard = tensorflow_data(context, data)

    def loss_of(x: Any, y: Any) -> Any:
        errors = tensorflow.matmul(x, weights[0]) + weights[1] - y
        return tensorflow.reduce_mean(tensorflow.square(errors))

    def measure(name: str) -> List[float]:
        _, x, y = next(iter(shard.batch(PER_RANK)))
        loss = loss_of(x, y)
        mean = hvd.allreduce(loss, name="training." + name)
        return [float(context.array(loss)), float(context.array(mean))]

    first = measure("first")
    seen: List[List[int]] = []
    for _ in range(EPOCHS):
        seen.append([])
        for numbers, x, y in shard.batch(BATCH):
            seen[-1] += context.array(numbers).tolist()
            with tensorflow.GradientTape() as plain:
                loss = loss_of(x, y)
            gradients = hvd.DistributedGradientTape(plain).gradient(loss, weights)
            for index, gradient in enumerate(gradients):
                velocity[index].assign(MOMENTUM * velocity[index] + gradient)
                weights[index].assign_sub(RATE * velocity[index])
    last = measure("last")
    got = joined(weights)
    checksums["variables at the end"] = digest(got)

    def load(path: str) -> bool:
        other = [tensorflow.Variable(tensorflow.zeros_like(weight)) for weight in weights]
        saved = tensorflow.train.Checkpoint(weight=other[0], bias=other[1])
        saved.restore(path + "-1")
        return digest(joined(other)) == digest(got)

    saved = tensorflow.train.Checkpoint(weight=weights[0], bias=weights[1])
    steps = steps_of(numpy, range(len(data[0])), size, [RATE] * (EPOCHS * PER_RANK // BATCH))
    plan = Plan(data, steps, *beginning(numpy, size), momentum=MOMENTUM, factor=1.0, half=False)
    return dict(
        checkpoint(context, saved.save, load),
        losses=[first[1], last[1]],
        metrics={"loss": last},
        seen=seen,
        samples=len(data[0]),
        checksums=checksums,
        **compare(numpy, plan, rank, got),
    )


def numbers_of(version: str) -> Tuple[int, ...]:
    """The leading numbers of a version: (2, 16) for 2.16.0rc1."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def has_keras_3(keras: Any) -> bool:
    """Whether tensorflow.keras is Keras 3."""
    return numbers_of(getattr(keras, "__version__", "2")) >= (3,)


def keras_limit(keras: Any, backend: Any, horovod_version: str, patched: bool) -> str:
    """Why Horovod cannot train with this Keras; empty if it can.

    Args:
        keras: the module tensorflow.keras.
        backend: the module that Horovod uses as the backend of Keras.
        horovod_version: as text.
        patched: whether it is patched for Keras 3.
    """
    version = getattr(keras, "__version__", "2")
    if patched or numbers_of(horovod_version) > LAST_RELEASE:
        return ""
    if has_keras_3(keras):
        return "Horovod {} supports Keras 2 only, and this TensorFlow has Keras {}".format(
            horovod_version, version
        )
    if not hasattr(backend, "get_value"):
        return "Horovod {} uses the backend of Keras 3, but TensorFlow has Keras {}".format(
            horovod_version, version
        )
    return ""


def warmup_rates(size: int) -> List[float]:
    """The learning rate of each step, which grows from base to size * base (RATE)."""
    by_epoch = PER_RANK // BATCH
    rates = []
    for step in range(KERAS_EPOCHS * by_epoch):
        progress = min((step + 1) / float(WARMUP_EPOCHS * by_epoch), 1.0)
        rates.append(RATE / size * (progress * (size - 1) + 1))
    return rates


def keras_model(context: Context, horovod: Any, start: Array) -> Any:
    """A compiled model with a rank's values."""
    keras = context.native.keras
    model = keras.Sequential([keras.layers.Dense(OUTPUTS)])
    model.build((None, FEATURES))
    model.set_weights([start[:-1], start[-1]])
    optimizers, more = keras.optimizers, {}
    if has_keras_3(keras):
        # XLA, the default on GPUs, does not support Horovod's operations.
        more["jit_compile"] = False
    else:
        # Horovod's callbacks set momentum, which only these optimizers have as a variable.
        optimizers = getattr(optimizers, "legacy", optimizers)
    if numbers_of(context.version) < (2, 4):
        more["experimental_run_tf_function"] = False
    optimizer = optimizers.SGD(learning_rate=RATE, momentum=MOMENTUM)
    model.compile(loss="mse", optimizer=horovod.DistributedOptimizer(optimizer), **more)
    return model


def keras_fit(context: Context) -> Dict[str, Any]:
    """model.fit with Horovod's optimizer for Keras and its three callbacks."""
    import numpy

    hvd, keras = context.hvd, context.native.keras
    horovod = importlib.import_module("horovod.tensorflow.keras")
    version = importlib.import_module("horovod").__version__
    patched = hasattr(importlib.import_module("horovod._keras"), "is_keras_3")
    limit = keras_limit(keras, horovod.callbacks.K, version, patched)
    if limit:
        return {"skip": limit}
    size = hvd.size()
    starts = numpy.stack([random_values(numpy, rank, "parameters") for rank in range(size)])
    model = keras_model(context, horovod, starts[hvd.rank()])
    data = make_data(numpy, size)
    shard = tensorflow_data(context, data)
    checksums: Dict[str, str] = {}
    local: List[float] = []
    averaged: List[float] = []

    def weights() -> Array:
        return numpy.vstack(model.get_weights())

    def after_batch(batch: Any, logs: Any = None) -> None:
        name = "weights after BroadcastGlobalVariablesCallback"
        checksums.setdefault(name, digest(weights()))

    callbacks = [
        horovod.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.LambdaCallback(
            on_batch_end=after_batch,
            on_epoch_end=lambda epoch, logs: local.append(float(logs["loss"])),
        ),
        horovod.callbacks.MetricAverageCallback(),
        horovod.callbacks.LearningRateWarmupCallback(
            initial_lr=RATE, warmup_epochs=WARMUP_EPOCHS, steps_per_epoch=PER_RANK // BATCH
        ),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: averaged.append(float(logs["loss"]))
        ),
    ]
    batches = shard.map(lambda number, x, y: (x, y)).batch(BATCH)
    model.fit(batches, epochs=KERAS_EPOCHS, verbose=0, callbacks=callbacks)
    got = weights()
    checksums["weights at the end"] = digest(got)
    ending = ".weights.h5" if has_keras_3(keras) else ""

    def load(path: str) -> bool:
        model.set_weights([0 * array for array in model.get_weights()])
        model.load_weights(path + ending)
        return digest(weights()) == digest(got)

    # The callback broadcasts after the first batch, so that each rank has its own start.
    steps = steps_of(numpy, range(len(data[0])), size, warmup_rates(size))
    plan = Plan(data, steps, starts, 0 * starts[0], momentum=MOMENTUM, factor=1.0, half=False)
    return dict(
        checkpoint(context, lambda path: model.save_weights(path + ending), load),
        losses=[averaged[0], averaged[-1]],
        metrics={
            "loss of epoch {}".format(1 + epoch): [local[epoch], averaged[epoch]]
            for epoch in range(KERAS_EPOCHS)
        },
        seen=[[int(number) for number, _, _ in shard]],
        samples=len(data[0]),
        checksums=checksums,
        rate=float(keras.backend.get_value(model.optimizer.learning_rate)),
        rate_wanted=RATE,
        **compare(numpy, plan, hvd.rank(), got),
    )


def without_tf32(context: Context) -> None:
    """Let GPUs multiply in float32, not in a type of fewer bits."""
    if context.framework == "torch":
        matmul = getattr(context.native.backends.cuda, "matmul", None)  # since 1.7
        if matmul:
            matmul.allow_tf32 = False
    else:
        name = "enable_tensor_float_32_execution"  # since 2.4
        getattr(context.native.config.experimental, name, lambda enabled: None)(False)


def in_tensorflow(part: Part) -> Part:
    """A part that runs on the rank's device, or reports why it is skipped."""

    def run_part(context: Context) -> Dict[str, Any]:
        tensorflow = context.native
        if numbers_of(context.version) < (2,):
            return {"skip": "hvdenv trains with TensorFlow 2 and newer only"}
        with tensorflow.device(None if context.device else "/cpu:0"):
            return part(context)

    return run_part


PARTS: Dict[str, List[Tuple[str, Part]]] = {
    "torch": [
        ("DistributedOptimizer", torch_plain),
        ("DistributedOptimizer with Compression.fp16", torch_half),
    ],
    "tensorflow": [
        ("DistributedGradientTape", in_tensorflow(tape)),
        ("Keras fit", in_tensorflow(keras_fit)),
    ],
}


def run(context: Context, option: str) -> None:
    """Train with all parts of the framework; there are no options."""
    if context.device:
        without_tf32(context)
    for name, part in PARTS[context.framework]:
        context.stage("training", name)
        began = time.time()
        facts = part(context)
        seconds = round(time.time() - began, 2)
        context.report(events.Training(part=name, seconds=seconds, **facts))
