"""The exercise ``speed``: samples per second of a training step.

OPTION is the time limit in seconds. The model is a perceptron of 2.1 million weights (8 MiB
of gradients). The data are random and in memory. Each rank has its own batch, so that the
total grows with the number of ranks, as in most training. The slowest rank counts. Rank 0
reports an events.Timed.

Runs on Python 3.6 and newer with numpy, which the frameworks require.
"""

import bench
from bench import Loop
from context import Context

BATCH, FEATURES, HIDDEN, CLASSES = 64, 512, 1024, 10
RATE = 0.01


def torch_step(context: Context) -> Loop:
    """A function that does training steps."""
    torch, hvd = context.native, context.hvd
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN // 2),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN // 2, CLASSES),
    ).to(context.device or "cpu")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    features = torch.randn(BATCH, FEATURES).to(context.device or "cpu")
    classes = torch.randint(0, CLASSES, (BATCH,)).to(context.device or "cpu")
    loss = torch.nn.CrossEntropyLoss()

    def steps(repeats: int) -> None:
        for _ in range(repeats):
            optimizer.zero_grad()
            loss(model(features), classes).backward()
            optimizer.step()
        next(model.parameters()).sum().item()  # waits for the GPU

    return steps


def tensorflow_step(context: Context) -> Loop:
    """The same without Keras, whose versions differ."""
    tensorflow, hvd = context.native, context.hvd
    half = HIDDEN // 2
    shapes = ((FEATURES, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, half), (half, CLASSES))
    with context.on_device():
        weights = [
            tensorflow.Variable(tensorflow.random.normal(shape, stddev=shape[0] ** -0.5))
            for shape in shapes
        ]
        features = tensorflow.random.normal((BATCH, FEATURES))
        classes = tensorflow.random.uniform((BATCH,), 0, CLASSES, "int64")
    hvd.broadcast_variables(weights, root_rank=0)

    @tensorflow.function  # type: ignore[untyped-decorator]
    def step() -> None:
        with tensorflow.GradientTape() as tape:
            values = features
            for weight in weights[:-1]:
                values = tensorflow.nn.relu(tensorflow.matmul(values, weight))
            loss = tensorflow.nn.sparse_softmax_cross_entropy_with_logits(
                classes, tensorflow.matmul(values, weights[-1])
            )
            loss = tensorflow.reduce_mean(loss)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        for weight, gradient in zip(weights, gradients):
            weight.assign_sub(RATE * gradient)

    def steps(repeats: int) -> None:
        with context.on_device():
            for _ in range(repeats):
                step()
            tensorflow.reduce_sum(weights[0]).numpy()

    return steps


STEPS = {"torch": torch_step, "tensorflow": tensorflow_step}


def run(context: Context, option: str) -> None:
    """Train until the time is over."""
    steps = STEPS[context.framework](context)
    clock = bench.Clock(context, float(option))
    rounds, repeats = bench.measure(clock, steps, 1.0)
    if context.hvd.rank() == 0:
        samples = BATCH * context.hvd.size()
        context.report(bench.timed("step", samples, rounds, repeats))
