"""The exercise ``training``: a small model, trained as scripts train with Horovod.

The model is linear and the data come from a fixed seed. Every rank starts with its own random
parameters, which reveals a broadcast without effect. Each rank also computes the result of one
process on the joined batches of all ranks, with numpy and without Horovod and the framework, and
how far rounding may take ranks from it.

OPTION selects parts of PARTS: ``usual`` those that Horovod's examples use; without it, all. Each
part reports one events.Training. Runs on Python 3.6 and newer with numpy, which the frameworks
require.
"""

import contextlib
import hashlib
import importlib
import inspect
import os
import tempfile
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import events
from context import Array, Context, numbers_of

Data = Tuple[Array, Array]
Step = Tuple[float, Array]
Update = Callable[[Array], Array]

FEATURES, OUTPUTS = 7, 3
PER_RANK, BATCH = 12, 4
EPOCHS, WARMUP_EPOCHS = 2, 1
MULTIPLIER = 0.5  # of the learning rate after the warmup
# RATE is size * base, as in scripts. Products with powers of two are exact, so that processors
# with and without fused multiply-add give the same bits.
RATE, MOMENTUM = 0.25, 0.5
# Half the relative distance of neighbouring numbers.
FLOAT32, FLOAT16 = 2.0**-24, 2.0**-11
# The largest norm of clipped gradients, between those of the first and of the last steps.
CLIP = 3.0
# Adam: how it averages, and the steps that an optimizer from a checkpoint has taken.
BETAS, STEPS_BEFORE = (0.9, 0.999), 5
# How often, and with which margin, rounding errors are tried.
TRIALS, MARGIN = 4, 8
# The latest version of Horovod, which supports Keras 2 only unless it is patched.
LAST_RELEASE = (0, 28, 1)


class Part(NamedTuple):
    """One training.

    Attributes:
        name: in events; unique for a framework.
        train: the function that trains.
        optimizer: ``SGD`` or ``Adam``.
        epochs: how many.
        momentum: of SGD.
        passes: batches of each step, whose gradients are added.
        half: whether gradients are sent as float16.
        sparse: whether the weights are an embedding with sparse gradients.
        bias_rate: learning rate of the bias, in a parameter group of its own if it is not 1.
        keras: the package; empty without Keras.
        warmup: whether Keras starts with one epoch of growing learning rates, and then halves them.
        clip: the largest norm of averaged gradients; 0 if they are not clipped.
    """

    name: str
    train: Callable[[Context, Any], Dict[str, Any]]
    optimizer: str = "SGD"
    epochs: int = 1
    momentum: float = MOMENTUM
    passes: int = 1
    half: bool = False
    sparse: bool = False
    bias_rate: float = 1.0
    keras: str = ""
    warmup: bool = False
    clip: float = 0.0

    @property
    def by_epoch(self) -> int:
        """How many steps an epoch has."""
        return PER_RANK // (BATCH * self.passes)


class Plan(NamedTuple):
    """A training that one process computes.

    Attributes:
        steps: learning rate and numbers of the samples, a row for each rank.
        starts: parameters of each rank in the first step, after which all have rank 0's.
        velocity: of the momentum, at the start; of Adam, the average of gradients.
        factor: averaged gradients are multiplied by it.
        steps_before: that Adam has taken before the first one.
    """

    part: Part
    data: Data
    steps: List[Step]
    starts: Array
    velocity: Array
    factor: float = 1.0
    steps_before: int = 0


def make_data(numpy: Any, size: int, sparse: bool = False) -> Data:
    """Inputs and targets of all samples; the last input is 1 for the bias.

    If `sparse`, one of the other inputs is 1 and the rest is 0.
    """
    source = numpy.random.RandomState(0)
    inputs = source.uniform(-2, 2, (PER_RANK * size, FEATURES + 1))
    if sparse:
        inputs = numpy.eye(FEATURES + 1)[source.randint(0, FEATURES, PER_RANK * size)]
    inputs[:, -1] = 1
    targets = inputs @ source.uniform(-1, 1, (FEATURES + 1, OUTPUTS))
    targets += source.uniform(-0.1, 0.1, targets.shape)
    return inputs.astype("float32"), targets.astype("float32")


def random_values(numpy: Any, rank: int, kind: str) -> Array:
    """The ``parameters`` or ``velocity`` that a rank starts with; the last row is the bias."""
    source = numpy.random.RandomState(2 * rank + (kind == "velocity"))
    return source.uniform(-1, 1, (FEATURES + 1, OUTPUTS)).astype("float32")


def make_plan(numpy: Any, part: Part, size: int) -> Plan:
    """The plan of a part; rank r has the samples r, r + size and so on."""
    rates = [RATE] * (part.by_epoch * part.epochs)
    rates = warmup_rates(size) if part.warmup else rates
    steps: List[Step] = []
    rows = numpy.arange(PER_RANK * size).reshape(PER_RANK, size).T
    for _ in range(part.epochs):
        steps += zip(rates[len(steps) :], numpy.split(rows, part.by_epoch, axis=1))
    # Keras broadcasts after the first batch, so that each rank has its own start.
    starting = range(size) if part.keras else [0] * size
    # The others start without the state of an optimizer.
    has_state = part.momentum and part.train in (torch_script, tape)
    return Plan(
        part=part,
        data=make_data(numpy, size, part.sparse),
        steps=steps,
        starts=numpy.stack([random_values(numpy, rank, "parameters") for rank in starting]),
        velocity=random_values(numpy, 0, "velocity") * bool(has_state),
        factor=float(part.passes),
        steps_before=STEPS_BEFORE * (part.optimizer == "Adam" and part.train is torch_script),
    )


def clipped(gradients: Array, clip: float) -> Array:
    """Gradients whose norm is at most `clip`, as torch computes them."""
    norm = float((gradients**2).sum() ** 0.5)
    return gradients * min(clip / (norm + 1e-6), 1.0) if clip else gradients


def sgd(numpy: Any, plan: Plan) -> Update:
    """Gradient descent with momentum, of averaged gradients."""
    velocity = plan.velocity

    def update(gradients: Array) -> Array:
        nonlocal velocity
        velocity = plan.part.momentum * velocity + clipped(gradients.mean(axis=0), plan.part.clip)
        return velocity

    return update


def adam(numpy: Any, plan: Plan) -> Update:
    """Adam of averaged gradients, in the form that TensorFlow uses.

    It may start from a checkpoint. Otherwise epsilon is 1: a small one would hide whether
    gradients were added or averaged.
    """
    step, (first, second) = plan.steps_before, BETAS
    mean, square = plan.velocity, (plan.velocity**2 + 1) * bool(step)
    epsilon = 1e-8 if step else 1.0

    def update(gradients: Array) -> Array:
        nonlocal mean, square, step
        gradient, step = gradients.mean(axis=0), step + 1
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient**2
        factor = (1 - second**step) ** 0.5 / (1 - first**step)
        return factor * mean / (square**0.5 + epsilon)

    return update


UPDATES = {"SGD": sgd, "Adam": adam}


def one_process(numpy: Any, plan: Plan, trial: int = 0) -> Array:
    """The parameters of one process in float64.

    In a trial (numbers from 1), every gradient, step and parameter has the largest error that
    rounding can cause, with random signs. The error of a sum of n terms is at most n roundings of
    the sum of their magnitudes.
    """
    inputs, targets = (array.astype("float64") for array in plan.data)
    weights, update = plan.starts.astype("float64"), UPDATES[plan.part.optimizer](numpy, plan)
    rates = numpy.vstack([numpy.ones((FEATURES, 1)), [[plan.part.bias_rate]]])
    source = numpy.random.RandomState(trial)
    # Adam in float32 computes 1 - 0.999**step, in which most bits cancel.
    noise = 8 * FLOAT32 / (1 - BETAS[1] if plan.part.optimizer == "Adam" else 1)
    for rate, rows in plan.steps:
        x, y = inputs[rows], targets[rows]
        turned = plan.factor * 2.0 / (rows.shape[1] * OUTPUTS) * x.swapaxes(1, 2)
        gradients = turned @ (x @ weights - y)
        signs = source.choice([-1.0, 1.0], weights.shape[-2:]) * bool(trial)
        terms = abs(turned) @ (abs(x) @ abs(weights) + abs(y))
        roundings = FEATURES + rows.shape[1] + len(rows) + 10
        halves = (len(rows) + 3) * (FLOAT16 * abs(gradients) + 2.0**-24) * plan.part.half
        gradients = gradients + signs * (FLOAT32 * roundings * terms + halves)
        step = rate * rates * update(gradients) * (1 + noise * signs)
        weights = (weights[0] if weights.ndim == 3 else weights) - step
        weights = weights * (1 + 2 * FLOAT32 * signs)
    return weights


def compare(numpy: Any, plan: Plan, rank: int, got: Array) -> Dict[str, Any]:
    """Compare this rank's parameters with those of one process."""

    def distance(plan: Plan) -> Tuple[float, float]:
        """How far the rank is from a plan, and how far rounding may take it."""
        wanted = one_process(numpy, plan)
        trials = [one_process(numpy, plan, 1 + trial) for trial in range(TRIALS)]
        bound = MARGIN * max(abs(trial - wanted).max() for trial in trials)
        return float(abs(got - wanted).max()), float(bound)

    difference, bound = distance(plan)
    facts: Dict[str, Any] = {"difference": difference, "bound": bound, "steps": len(plan.steps)}
    if not difference <= bound:
        own = [(rate, rows[rank : rank + 1]) for rate, rows in plan.steps]
        alone = plan._replace(steps=own, starts=plan.starts[rank : rank + 1])
        others = {
            "gradients were added and not averaged": plan._replace(
                factor=plan.factor * len(plan.starts)
            ),
            "it had trained alone": alone,
        }
        for what, other in others.items():
            found, bound = distance(other)
            if found <= bound:
                facts["like"] = what
    return facts


def digest(*arrays: Array) -> str:
    """A checksum of all bits of arrays."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


class Skip(Exception):
    """Why a part is not trained."""


def arguments(context: Context, part: Part) -> Dict[str, Any]:
    """What a part passes to Horovod's optimizer or tape."""
    found: Dict[str, Any] = {}
    if part.passes > 1:
        found["backward_passes_per_step"] = part.passes
    if part.half:
        found["compression"] = context.hvd.Compression.fp16
    return found


def compared(
    context: Context,
    plan: Plan,
    got: Array,
    losses: List[List[float]],
    checksums: Dict[str, str],
) -> Dict[str, Any]:
    """What a rank reports of its training, with a comparison to one process.

    Args:
        context: the rank's.
        plan: of one process.
        got: the rank's parameters.
        losses: before and after the training, each of this rank's samples and of all.
        checksums: by what they are of.
    """
    first, last = losses
    return dict(
        compare(context.numpy, plan, context.hvd.rank(), got),
        losses=[first[1], last[1]],
        metrics={"loss": last},
        checksums=checksums,
    )


def own_data(context: Context, plan: Plan) -> List[Array]:
    """Inputs and targets of this rank's samples."""
    hvd = context.hvd
    return [array[hvd.rank() :: hvd.size()].copy() for array in plan.data]


# Torch.


def torch_model(context: Context, part: Part) -> Any:
    """A model with this rank's values; the buffers of its BatchNorm are only broadcast."""
    numpy = context.numpy
    torch = context.native
    values = random_values(numpy, context.hvd.rank(), "parameters")

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(context.tensor(values[:-1].copy()))
            self.bias = torch.nn.Parameter(context.tensor(values[-1].copy()))
            self.norm = torch.nn.BatchNorm1d(OUTPUTS, affine=False).to(self.bias.device)
            self.norm.running_mean.copy_(self.bias.detach())
            self.norm.num_batches_tracked.fill_(1 + context.hvd.rank())

        def forward(self, x: Any) -> Any:
            if part.sparse:
                number = x[:, :-1].argmax(1)
                return torch.nn.functional.embedding(number, self.weight, sparse=True) + self.bias
            return x @ torch.cat([self.weight, self.bias[None]])

    return Model()


def torch_optimizer(context: Context, part: Part, model: Any) -> Any:
    """The optimizer of torch, with another learning rate on each rank if it has a state.

    Without one, Horovod does not broadcast the learning rate either.
    """
    rate = RATE / (1 + context.hvd.rank() * bool(part.momentum))
    groups = [{"params": [model.weight, model.bias], "lr": rate}]
    if part.bias_rate != 1:
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": rate * part.bias_rate}]
    if part.optimizer == "Adam":
        return context.native.optim.Adam(groups, lr=rate)
    return context.native.optim.SGD(groups, lr=rate, momentum=part.momentum)


def torch_state(context: Context, part: Part, optimizer: Any) -> Any:
    """The state of an optimizer from a checkpoint of this rank."""
    numpy = context.numpy
    values = random_values(numpy, context.hvd.rank(), "velocity")
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for _ in range(STEPS_BEFORE):  # without effect on parameters
        for parameter in parameters:
            parameter.grad = context.native.zeros_like(parameter)
        optimizer.step()
    for parameter, own in zip(parameters, (values[:-1], values[-1])):
        state = optimizer.state[parameter]
        given = {"momentum_buffer": own, "exp_avg": own, "exp_avg_sq": own**2 + 1}
        for name in set(given) & set(state):
            state[name].copy_(context.tensor(given[name].copy()))
    return optimizer.state_dict()


def torch_broadcast(context: Context, part: Part) -> Tuple[Any, Any, Dict[str, str]]:
    """A model and its optimizer after Horovod's broadcasts, and their checksums.

    As if training continued from a checkpoint, which with Adam rank 0 alone has loaded.
    """
    numpy = context.numpy
    torch, hvd = context.native, context.hvd
    model = torch_model(context, part)
    optimizer = hvd.DistributedOptimizer(
        torch_optimizer(context, part, model),
        named_parameters=model.named_parameters(),
        **arguments(context, part),
    )
    if part.momentum and (part.optimizer != "Adam" or hvd.rank() == 0):
        state = torch_state(context, part, torch_optimizer(context, part, model))
        optimizer.load_state_dict(state)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if part.sparse:
        for parameter in model.parameters():
            parameter.grad = None  # not the zeros of the broadcast, which are dense

    def arrays(values: Iterable[Any]) -> List[Array]:
        tensors = [each for each in values if torch.is_tensor(each)]
        return [context.array(each.detach()) for each in tensors]

    state = optimizer.state_dict()
    states = [each[name] for _, each in sorted(state["state"].items()) for name in sorted(each)]
    rates = numpy.array([group["lr"] for group in state["param_groups"]])
    checksums = {
        "parameters and buffers after broadcast_parameters": digest(
            *arrays(model.state_dict().values())
        ),
        "state after broadcast_optimizer_state": digest(rates, *arrays(states)),
    }
    return model, optimizer, checksums


def torch_script(context: Context, part: Part) -> Dict[str, Any]:
    """hvd.DistributedOptimizer and both broadcasts."""
    numpy, torch, hvd = context.numpy, context.native, context.hvd
    model, optimizer, checksums = torch_broadcast(context, part)
    plan = make_plan(numpy, part, hvd.size())
    own = [context.tensor(each) for each in own_data(context, plan)]
    loss_of = torch.nn.MSELoss()

    def measure(name: str) -> List[float]:
        loss = loss_of(model(own[0]), own[1]).detach()
        return [float(loss), float(hvd.allreduce(loss, name="training." + name))]

    def joined(state: Dict[str, Any]) -> Array:
        return numpy.vstack([context.array(state["weight"]), context.array(state["bias"])])

    first = measure("first")
    for _ in range(part.epochs):
        for batch, (x, y) in enumerate(zip(*(each.split(BATCH) for each in own)), start=1):
            loss_of(model(x), y).backward()
            if batch % part.passes:
                continue
            with contextlib.ExitStack() as stack:
                if part.clip:
                    optimizer.synchronize()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), part.clip)
                    stack.enter_context(optimizer.skip_synchronize())
                optimizer.step()
            optimizer.zero_grad()
    losses, got = [first, measure("last")], joined(model.state_dict())
    checksums["parameters at the end"] = digest(got)
    rates = {"rate": optimizer.param_groups[0]["lr"], "rate_wanted": RATE}
    return dict(compared(context, plan, got, losses, checksums), **rates)


# TensorFlow.


def tensorflow_loss(context: Context, part: Part, weights: List[Any], x: Any, y: Any) -> Any:
    """The mean of squared errors."""
    tensorflow = context.native
    if part.sparse:
        number = tensorflow.argmax(x[:, :-1], axis=1)
        outputs = tensorflow.gather(weights[0], number) + weights[1]
    else:
        outputs = tensorflow.matmul(x[:, :-1], weights[0]) + weights[1]
    return tensorflow.reduce_mean(tensorflow.square(outputs - y))


def tape(context: Context, part: Part) -> Dict[str, Any]:
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
    plan = make_plan(numpy, part, hvd.size())
    own = own_data(context, plan)

    def measure(name: str) -> List[float]:
        loss = tensorflow_loss(context, part, weights, *own)
        mean = hvd.allreduce(loss, name="training." + name)
        return [float(context.array(loss)), float(context.array(mean))]

    first = measure("first")
    for _ in range(part.epochs):
        for at in range(0, PER_RANK, BATCH):
            x, y = (each[at : at + BATCH] for each in own)
            with tensorflow.GradientTape() as plain:
                loss = tensorflow_loss(context, part, weights, x, y)
            both = hvd.DistributedGradientTape(plain, **arguments(context, part))
            for index, gradient in enumerate(both.gradient(loss, weights)):
                gradient = tensorflow.convert_to_tensor(gradient)
                velocity[index].assign(part.momentum * velocity[index] + gradient)
                weights[index].assign_sub(RATE * velocity[index])
    losses, got = [first, measure("last")], joined(weights)
    checksums["variables at the end"] = digest(got)

    return compared(context, plan, got, losses, checksums)


def graph(context: Context, part: Part) -> Dict[str, Any]:
    """hvd.DistributedOptimizer in a graph of TensorFlow 1, with hvd.broadcast_global_variables.

    In the host's memory: a session would not use the rank's GPU, but another one.
    """
    tensorflow = context.native.compat.v1
    config = tensorflow.ConfigProto(device_count={"GPU": 0})
    with context.native.Graph().as_default(), tensorflow.Session(config=config) as session:
        return in_session(context, part, session)


def in_session(context: Context, part: Part, session: Any) -> Dict[str, Any]:
    """Build the graph and train."""
    numpy = context.numpy
    tensorflow, hvd = context.native.compat.v1, context.hvd
    values = random_values(numpy, hvd.rank(), "parameters")
    weights = [tensorflow.Variable(values[:-1]), tensorflow.Variable(values[-1])]
    x = tensorflow.placeholder("float32", (None, FEATURES + 1))
    y = tensorflow.placeholder("float32", (None, OUTPUTS))
    loss = tensorflow_loss(context, part, weights, x, y)
    mean = hvd.allreduce(loss, name="training.loss")
    optimizer = tensorflow.train.GradientDescentOptimizer(RATE)
    if part.momentum:
        optimizer = tensorflow.train.MomentumOptimizer(RATE, part.momentum)
    train = hvd.DistributedOptimizer(optimizer, **arguments(context, part)).minimize(loss)
    hook = hvd.BroadcastGlobalVariablesHook(0)
    hook.begin()
    broadcast = hvd.broadcast_global_variables(0)
    session.run(
        [tensorflow.global_variables_initializer(), tensorflow.local_variables_initializer()]
    )
    name = "BroadcastGlobalVariablesHook" if part.momentum else "broadcast_global_variables"
    if part.momentum:
        hook.after_create_session(session, None)
    else:
        session.run(broadcast)

    def joined() -> Array:
        return numpy.vstack(session.run(weights))

    checksums = {"variables after " + name: digest(joined())}
    plan = make_plan(numpy, part, hvd.size())
    own = own_data(context, plan)

    def measure() -> List[float]:
        return [float(each) for each in session.run([loss, mean], {x: own[0], y: own[1]})]

    first = measure()
    for _ in range(part.epochs):
        for at in range(0, PER_RANK, BATCH):
            session.run(train, {x: own[0][at : at + BATCH], y: own[1][at : at + BATCH]})
    losses, got = [first, measure()], joined()
    checksums["variables at the end"] = digest(got)

    return compared(context, plan, got, losses, checksums)


# Keras.


def has_keras_3(keras: Any) -> bool:
    """Whether a module is Keras 3."""
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
    """The rate of each step: it grows from base to size * base (RATE), and is then multiplied."""
    steps = WARMUP_EPOCHS * PER_RANK // BATCH
    rates = [RATE / size * ((step + 1.0) / steps * (size - 1) + 1) for step in range(steps)]
    return rates + [RATE * MULTIPLIER] * steps


def keras_model(context: Context, part: Part, keras: Any, horovod: Any, start: Array) -> Any:
    """A compiled model with a rank's values."""
    model = keras.Sequential([keras.layers.Dense(OUTPUTS)])
    model.build((None, FEATURES))
    model.set_weights([start[:-1], start[-1]])
    optimizers, more = keras.optimizers, {}
    if has_keras_3(keras):
        # XLA, the default on GPUs, does not support Horovod's operations.
        more["jit_compile"] = False
    else:
        # Horovod's callbacks set momentum, which only these optimizers have as a variable. Keras 2.10
        # has a package of this name without them.
        legacy = getattr(optimizers, "legacy", None)
        optimizers = legacy if hasattr(legacy, "Adam") else optimizers
    if numbers_of(context.version) < (2, 4):
        more["experimental_run_tf_function"] = False
    if part.optimizer == "Adam":
        optimizer = optimizers.Adam(RATE, *BETAS, epsilon=1.0)
    else:
        optimizer = optimizers.SGD(learning_rate=RATE, momentum=part.momentum)
    optimizer = horovod.DistributedOptimizer(optimizer, **arguments(context, part))
    model.compile(loss="mse", optimizer=optimizer, **more)
    return model


def keras_limit_of(context: Context) -> str:
    """Why Horovod cannot use the Keras of TensorFlow; empty if it can."""
    version = importlib.import_module("horovod").__version__
    patched = hasattr(importlib.import_module("horovod._keras"), "is_keras_3")
    package = importlib.import_module("horovod.tensorflow.keras")
    return keras_limit(context.native.keras, package.callbacks.K, version, patched)


def keras_package(context: Context, part: Part) -> Tuple[Any, Any]:
    """Keras, and the package of Horovod for it. Raises Skip if that cannot train."""
    limit = keras_limit_of(context)
    if limit:
        raise Skip(limit)
    if part.keras == "horovod.tensorflow.keras":
        return context.native.keras, importlib.import_module(part.keras)
    try:
        keras = importlib.import_module("keras")
    except ImportError as error:
        raise Skip("there is no package keras") from error
    package = importlib.import_module(part.keras)
    if has_keras_3(keras):
        raise Skip("hvdenv imports horovod.keras, but does not train with it and Keras 3")
    return keras, package


def keras_callbacks(
    part: Part, keras: Any, horovod: Any, after_batch: Callable[..., None]
) -> Tuple[List[Any], List[float], List[float]]:
    """Callbacks for model.fit(), and the lists that get this rank's and the mean loss by epoch."""
    local: List[float] = []
    averaged: List[float] = []
    log = keras.callbacks.LambdaCallback
    callbacks = [
        horovod.callbacks.BroadcastGlobalVariablesCallback(0),
        log(
            on_batch_end=after_batch,
            on_epoch_end=lambda epoch, logs: local.append(float(logs["loss"])),
        ),
        horovod.callbacks.MetricAverageCallback(),
        log(on_epoch_end=lambda epoch, logs: averaged.append(float(logs["loss"]))),
    ]
    if part.warmup:
        callbacks.append(
            horovod.callbacks.LearningRateWarmupCallback(
                initial_lr=RATE, warmup_epochs=WARMUP_EPOCHS, steps_per_epoch=PER_RANK // BATCH
            )
        )
        callbacks.append(
            horovod.callbacks.LearningRateScheduleCallback(
                initial_lr=RATE, multiplier=lambda _: MULTIPLIER, start_epoch=WARMUP_EPOCHS
            )
        )
    return callbacks, local, averaged


def best_model(context: Context, keras: Any, horovod: Any, path: str) -> List[Any]:
    """The callback with which rank 0 saves a model whose loss falls."""
    if context.hvd.rank():
        return []
    if has_keras_3(keras):  # it refuses Horovod's callback, which has no path
        return [keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True)]
    callback = horovod.callbacks.BestModelCheckpoint(monitor="loss")
    callback.filepath = path
    return [callback]


def loads_as_saved(horovod: Any, model: Any, path: str) -> Optional[bool]:
    """Whether load_model() gives the weights of a model, and an optimizer of Horovod.

    None before Horovod 0.28: it passes arguments on that optimizers of Keras 2.9 and newer refuse.
    """
    if numbers_of(importlib.import_module("horovod").__version__) < (0, 28):
        return None
    if not os.path.exists(path):
        return False
    options = {}
    legacy = "legacy" in type(model.optimizer).__mro__[1].__module__
    if legacy and "legacy_opts" in inspect.signature(horovod.load_model).parameters:
        options["legacy_opts"] = True
    loaded = horovod.load_model(path, **options)
    kinds = [set(vars(type(each.optimizer))) for each in (model, loaded)]
    weights = [digest(*each.get_weights()) for each in (model, loaded)]
    return kinds[0] == kinds[1] and weights[0] == weights[1]


def keras_fit(context: Context, part: Part) -> Dict[str, Any]:
    """model.fit with Horovod's optimizer for Keras and its callbacks; rank 0 saves and loads."""
    with tempfile.TemporaryDirectory(prefix="hvdenv-training-") as folder:
        return keras_fit_in(context, part, folder)


def keras_fit_in(context: Context, part: Part, folder: str) -> Dict[str, Any]:
    """The same, with models in a folder."""
    numpy, hvd = context.numpy, context.hvd
    keras, horovod = keras_package(context, part)
    plan = make_plan(numpy, part, hvd.size())
    model = keras_model(context, part, keras, horovod, plan.starts[hvd.rank()])
    x, y = own_data(context, plan)
    checksums: Dict[str, str] = {}

    def weights() -> Array:
        return numpy.vstack(model.get_weights())

    def after_batch(batch: Any, logs: Any = None) -> None:
        name = "weights after BroadcastGlobalVariablesCallback"
        checksums.setdefault(name, digest(weights()))

    callbacks, local, averaged = keras_callbacks(part, keras, horovod, after_batch)
    path = os.path.join(folder, "model.keras" if has_keras_3(keras) else "model.h5")
    callbacks += best_model(context, keras, horovod, path)
    options = {"epochs": part.epochs, "verbose": 0, "shuffle": False, "callbacks": callbacks}
    model.fit(x[:, :-1], y, BATCH, **options)
    got = weights()
    checksums["weights at the end"] = digest(got)
    losses = [list(each) for each in zip(local, averaged)]
    found = compared(context, plan, got, [losses[0], losses[-1]], checksums)
    return dict(
        found,
        metrics={"loss of epoch {}".format(1 + epoch): each for epoch, each in enumerate(losses)},
        rate=float(model.optimizer.learning_rate.numpy()),
        rate_wanted=RATE * MULTIPLIER if part.warmup else RATE,
        same=None if hvd.rank() else loads_as_saved(horovod, model, path),
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


def without_autograph() -> None:
    """Let TensorFlow build graphs from Horovod's functions as they are.

    It would rewrite the source of each first (AutoGraph), which takes a second and changes no
    result. What Horovod itself passes to tf.function is still rewritten.
    """
    with contextlib.suppress(ImportError, AttributeError):  # internals of TensorFlow 2
        config: Any = importlib.import_module("tensorflow.python.autograph.core.config")
        config.CONVERSION_RULES = (config.DoNotConvert("horovod"), *config.CONVERSION_RULES)


# How many of PARTS, from the first, are ``usual``.
USUAL = {"torch": 6, "tensorflow": 4}
SPARSE: Dict[str, Any] = {"sparse": True, "momentum": 0.0}
OPTIMIZER, TAPE = "DistributedOptimizer", "DistributedGradientTape"
PARTS: Dict[str, List[Part]] = {
    "torch": [
        Part(OPTIMIZER, torch_script, epochs=EPOCHS),
        Part(OPTIMIZER + " with Compression.fp16", torch_script, half=True),
        Part(OPTIMIZER + " with backward_passes_per_step", torch_script, epochs=EPOCHS, passes=3),
        Part(OPTIMIZER + " with skip_synchronize", torch_script, epochs=EPOCHS, clip=CLIP),
        Part(OPTIMIZER + " with Adam and two groups", torch_script, "Adam", EPOCHS, bias_rate=0.5),
        Part(OPTIMIZER + " with sparse gradients", torch_script, **SPARSE),
    ],
    "tensorflow": [
        Part(TAPE, tape, epochs=EPOCHS),
        Part(OPTIMIZER + " with sparse gradients", graph, **SPARSE),
        Part("Keras fit", keras_fit, epochs=EPOCHS, keras="horovod.tensorflow.keras", warmup=True),
        Part("Keras fit with horovod.keras", keras_fit, "Adam", EPOCHS, keras="horovod.keras"),
        Part(TAPE + " with sparse gradients", tape, **SPARSE),
        Part(TAPE + " with Compression.fp16", tape, half=True),
        Part(OPTIMIZER, graph),
        Part(OPTIMIZER + " with backward_passes_per_step", graph, epochs=EPOCHS, passes=3),
    ],
}


def run_part(context: Context, part: Part) -> Dict[str, Any]:
    """Train on the rank's device, or report why that is skipped."""
    try:
        if context.framework == "torch":
            return part.train(context, part)
        if numbers_of(context.version) < (2,):
            raise Skip("hvdenv trains with TensorFlow 2 and newer only")
        with context.native.device(None if context.device else "/cpu:0"):
            return part.train(context, part)
    except Skip as error:
        return {"skip": str(error)}


def run(context: Context, option: str) -> None:
    """Train with the parts that the option selects."""
    if context.device:
        without_tf32(context)
    usual, parts = option == "usual", PARTS[context.framework]
    if usual and context.framework == "tensorflow":
        without_autograph()
    for part in parts[: USUAL[context.framework] if usual else len(parts)]:
        context.stage("training", part.name)
        began = time.monotonic()
        facts = run_part(context, part)
        seconds = round(time.monotonic() - began, 2)
        context.report(events.Training(part=part.name, seconds=seconds, **facts))
