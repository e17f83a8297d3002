"""The exercise ``training``: a small model, trained as scripts train with Horovod.

The model is linear and the data come from a fixed seed. Every rank starts with its own random
parameters, which reveals a broadcast without effect. Each rank also computes the result of one
process on the joined batches of all ranks, with numpy and without Horovod and the framework. Each
part of PARTS reports one events.Training. Runs on Python 3.6 and newer with numpy, which the
frameworks require.
"""

import contextlib
import hashlib
import importlib
import time
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import events
from context import Array, Context, numbers_of

Data = Tuple[Array, Array]
# A training: what a rank reports of it.
Part = Callable[[Context], Dict[str, Any]]

FEATURES, OUTPUTS = 7, 3
PER_RANK, BATCH, EPOCHS = 12, 4, 2
RATE, MOMENTUM = 0.25, 0.5
# Half the relative distance of neighbouring numbers of float32.
EPSILON = 2.0**-24


class Plan(NamedTuple):
    """A training that one process computes.

    Attributes:
        steps: numbers of the samples, a row for each rank.
        starts: parameters of each rank in the first step, after which all have rank 0's.
        velocity: of the momentum, at the start.
    """

    data: Data
    steps: List[Array]
    starts: Array
    velocity: Array


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


def make_plan(numpy: Any, size: int, keras: bool = False) -> Plan:
    """A plan; rank r has the samples r, r + size and so on.

    Keras broadcasts after the first batch, so that each rank has its own start, and no state.
    """
    rows = numpy.arange(PER_RANK * size).reshape(PER_RANK, size).T
    starting = range(size) if keras else [0] * size
    return Plan(
        data=make_data(numpy, size),
        steps=numpy.split(rows, PER_RANK // BATCH, axis=1) * EPOCHS,
        starts=numpy.stack([random_values(numpy, rank, "parameters") for rank in starting]),
        velocity=random_values(numpy, 0, "velocity") * (not keras),
    )


def one_process(numpy: Any, plan: Plan, factor: float = 1.0) -> Array:
    """The parameters of one process in float64, whose averaged gradients are multiplied."""
    inputs, targets = (array.astype("float64") for array in plan.data)
    weights, velocity = plan.starts.astype("float64"), plan.velocity
    for rows in plan.steps:
        x, y = inputs[rows], targets[rows]
        gradients = 2.0 / (BATCH * OUTPUTS) * x.swapaxes(1, 2) @ (x @ weights - y)
        velocity = MOMENTUM * velocity + factor * gradients.mean(axis=0)
        weights = weights[:1] - RATE * velocity
    return weights[0]


def compare(numpy: Any, plan: Plan, rank: int, got: Array) -> Dict[str, Any]:
    """Compare this rank's parameters with those of one process."""
    # How far rounding may take a rank; sums of n gradients are rounded n times.
    bound = 64 * EPSILON * (len(plan.starts) + 16)
    difference = float(abs(got - one_process(numpy, plan)).max())
    facts: Dict[str, Any] = {"difference": difference, "bound": bound, "steps": len(plan.steps)}
    if not difference <= bound:
        own = [rows[rank : rank + 1] for rows in plan.steps]
        alone = plan._replace(steps=own, starts=plan.starts[rank : rank + 1])
        added = one_process(numpy, plan, len(plan.starts))
        if abs(got - added).max() <= bound:
            facts["like"] = "gradients were added and not averaged"
        elif abs(got - one_process(numpy, alone)).max() <= bound:
            facts["like"] = "it had trained alone"
    return facts


def digest(*arrays: Array) -> str:
    """A checksum of all bits of arrays."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


class Skip(Exception):
    """Why a part is not trained."""


def compared(
    context: Context, plan: Plan, got: Array, losses: List[float], checksums: Dict[str, str]
) -> Dict[str, Any]:
    """What a rank reports of its training, with a comparison to one process.

    Args:
        context: the rank's.
        plan: of one process.
        got: the rank's parameters.
        losses: of this rank's samples, before and after the training.
        checksums: by what they are of.
    """
    found = compare(context.numpy, plan, context.hvd.rank(), got)
    checksums["parameters at the end"] = digest(got)
    return dict(found, losses=losses, checksums=checksums)


def own_data(context: Context, plan: Plan) -> List[Array]:
    """Inputs and targets of this rank's samples."""
    hvd = context.hvd
    return [array[hvd.rank() :: hvd.size()].copy() for array in plan.data]


# Torch.


def torch_model(context: Context) -> Any:
    """A model with this rank's values; the buffers of its BatchNorm are only broadcast."""
    torch = context.native
    values = random_values(context.numpy, context.hvd.rank(), "parameters")

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(context.tensor(values[:-1].copy()))
            self.bias = torch.nn.Parameter(context.tensor(values[-1].copy()))
            self.norm = torch.nn.BatchNorm1d(OUTPUTS, affine=False).to(self.bias.device)
            self.norm.running_mean.copy_(self.bias.detach())
            self.norm.num_batches_tracked.fill_(1 + context.hvd.rank())

        def forward(self, x: Any) -> Any:
            return x @ torch.cat([self.weight, self.bias[None]])

    return Model()


def torch_broadcast(context: Context) -> Tuple[Any, Any, Dict[str, str]]:
    """A model and its optimizer after Horovod's broadcasts, and their checksums.

    Before, each rank has a learning rate and a momentum of its own, as if from a checkpoint.
    """
    torch, hvd = context.native, context.hvd
    model = torch_model(context)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE / (1 + hvd.rank()), momentum=MOMENTUM),
        named_parameters=model.named_parameters(),
    )
    velocity = random_values(context.numpy, hvd.rank(), "velocity")
    for parameter, own in ((model.weight, velocity[:-1]), (model.bias, velocity[-1])):
        optimizer.state[parameter]["momentum_buffer"] = context.tensor(own.copy())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def checksum(*tensors: Any) -> str:
        return digest(*(context.array(each.detach()) for each in tensors))

    buffers = [optimizer.state[each]["momentum_buffer"] for each in model.parameters()]
    rates = torch.tensor([group["lr"] for group in optimizer.param_groups])
    checksums = {
        "parameters and buffers after broadcast_parameters": checksum(*model.state_dict().values()),
        "state after broadcast_optimizer_state": checksum(rates, *buffers),
    }
    return model, optimizer, checksums


def torch_script(context: Context) -> Dict[str, Any]:
    """hvd.DistributedOptimizer and both broadcasts."""
    numpy, torch, hvd = context.numpy, context.native, context.hvd
    model, optimizer, checksums = torch_broadcast(context)
    plan = make_plan(numpy, hvd.size())
    own = [context.tensor(each) for each in own_data(context, plan)]
    loss_of = torch.nn.MSELoss()

    first = float(loss_of(model(own[0]), own[1]).detach())
    for _ in range(EPOCHS):
        for x, y in zip(*(each.split(BATCH) for each in own)):
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    got = numpy.vstack([context.array(each.detach()) for each in (model.weight, model.bias)])
    last = float(loss_of(model(own[0]), own[1]).detach())
    return compared(context, plan, got, [first, last], checksums)


# TensorFlow.


def tape(context: Context) -> Dict[str, Any]:
    """hvd.DistributedGradientTape and broadcast_variables, without Keras, whose versions differ."""
    numpy, tensorflow, hvd = context.numpy, context.native, context.hvd

    def variables(kind: str) -> List[Any]:
        values = random_values(numpy, hvd.rank(), kind)
        return [tensorflow.Variable(values[:-1]), tensorflow.Variable(values[-1])]

    def joined(pair: List[Any]) -> Array:
        return numpy.vstack([context.array(one) for one in pair])

    weights, velocity = variables("parameters"), variables("velocity")
    hvd.broadcast_variables(weights + velocity, root_rank=0)
    checksums = {"variables after broadcast_variables": digest(joined(weights), joined(velocity))}
    plan = make_plan(numpy, hvd.size())
    own = own_data(context, plan)

    def loss_of(x: Any, y: Any) -> Any:
        outputs = tensorflow.matmul(x[:, :-1], weights[0]) + weights[1]
        return tensorflow.reduce_mean(tensorflow.square(outputs - y))

    first = float(context.array(loss_of(*own)))
    for _ in range(EPOCHS):
        for at in range(0, PER_RANK, BATCH):
            with tensorflow.GradientTape() as plain:
                loss = loss_of(*(each[at : at + BATCH] for each in own))
            both = hvd.DistributedGradientTape(plain)
            for index, gradient in enumerate(both.gradient(loss, weights)):
                velocity[index].assign(MOMENTUM * velocity[index] + gradient)
                weights[index].assign_sub(RATE * velocity[index])
    last = float(context.array(loss_of(*own)))
    return compared(context, plan, joined(weights), [first, last], checksums)


# Keras.


def has_keras_3(keras: Any) -> bool:
    """Whether a module is Keras 3."""
    return numbers_of(getattr(keras, "__version__", "2")) >= (3,)


def can_train(keras: Any, backend: Any, patched: bool) -> bool:
    """Whether Horovod, perhaps patched for Keras 3, can train with tensorflow.keras.

    Horovod's own backend may be Keras 3 beside a TensorFlow with Keras 2; only that of Keras 2 has
    get_value().
    """
    return patched or (hasattr(backend, "get_value") and not has_keras_3(keras))


def keras_for(context: Context) -> Any:
    """Horovod's package for the Keras of TensorFlow. Raises Skip if it cannot train."""
    package = importlib.import_module("horovod.tensorflow.keras")
    patched = hasattr(importlib.import_module("horovod._keras"), "is_keras_3")
    if not can_train(context.native.keras, package.callbacks.K, patched):
        version = importlib.import_module("horovod").__version__
        raise Skip("Horovod {} without the patch keras-3 supports Keras 2 only".format(version))
    return package


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
        # With Keras 2.11 and newer, Horovod before 0.28 supports no others (horovod#3860). Keras 2.10
        # has a package of this name without them.
        legacy = getattr(optimizers, "legacy", None)
        optimizers = legacy if hasattr(legacy, "SGD") else optimizers
    if numbers_of(context.version) < (2, 4):
        more["experimental_run_tf_function"] = False
    optimizer = optimizers.SGD(learning_rate=RATE, momentum=MOMENTUM)
    model.compile(loss="mse", optimizer=horovod.DistributedOptimizer(optimizer), **more)
    return model


def keras_fit(context: Context) -> Dict[str, Any]:
    """model.fit with Horovod's optimizer for Keras, and the callback that broadcasts."""
    numpy, hvd, horovod = context.numpy, context.hvd, keras_for(context)
    plan = make_plan(numpy, hvd.size(), keras=True)
    model = keras_model(context, horovod, plan.starts[hvd.rank()])
    x, y = own_data(context, plan)
    checksums: Dict[str, str] = {}

    def after_batch(batch: Any, logs: Any = None) -> None:
        name = "weights after BroadcastGlobalVariablesCallback"
        checksums.setdefault(name, digest(*model.get_weights()))

    callbacks = [
        horovod.callbacks.BroadcastGlobalVariablesCallback(0),
        context.native.keras.callbacks.LambdaCallback(on_batch_end=after_batch),
    ]
    options = {"epochs": EPOCHS, "verbose": 0, "shuffle": False, "callbacks": callbacks}
    epochs = model.fit(x[:, :-1], y, BATCH, **options).history["loss"]
    losses = [float(epochs[0]), float(epochs[-1])]
    return compared(context, plan, numpy.vstack(model.get_weights()), losses, checksums)


def without_tf32(context: Context) -> None:
    """Let GPUs multiply in float32, not in a type of fewer bits."""
    if context.framework == "torch":
        matmul = getattr(context.native.backends.cuda, "matmul", None)  # since 1.7
        if matmul:
            matmul.allow_tf32 = False
    else:
        name = "enable_tensor_float_32_execution"  # since 2.4
        getattr(context.native.config.experimental, name, lambda enabled: None)(False)


PARTS: Dict[str, Dict[str, Part]] = {
    "torch": {"DistributedOptimizer": torch_script},
    "tensorflow": {"DistributedGradientTape": tape, "Keras fit": keras_fit},
}


def run(context: Context, option: str) -> None:
    """Train all parts of the framework on the rank's device, or report why one is skipped."""
    if context.device:
        without_tf32(context)
    for name, part in PARTS[context.framework].items():
        context.stage("training", name)
        began = time.monotonic()
        try:
            if context.framework == "tensorflow" and numbers_of(context.version) < (2,):
                raise Skip("hvdenv trains with TensorFlow 2 and newer only")
            with contextlib.ExitStack() if context.device else context.on_device():
                facts = part(context)
        except Skip as error:
            facts = {"skip": str(error)}
        seconds = round(time.monotonic() - began, 2)
        context.report(events.Training(part=name, seconds=seconds, **facts))
