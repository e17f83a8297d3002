/* What the network gives without Horovod: a raw MPI allreduce, or a raw NCCL one on GPUs.

   usage: yardstick SECONDS LARGEST DEADLINE [NCCL RUNTIME]

   It measures as bench.py does: sizes from 1 KiB to LARGEST bytes, each four times the
   one before; rounds of allreduces in place, with a barrier before each; the slowest rank
   counts. Rank 0 prints one line for each size:

       @hvdenv-yardstick {"size": 1024, "ranks": 2, "seconds": [0.1, ...]}

   with the seconds of one allreduce: minimum, quartiles and maximum of the rounds. It ends
   when SECONDS are over; a process that lives for DEADLINE seconds is ended by SIGALRM.

   NCCL is the path of libnccl or librccl, RUNTIME that of libcudart or libamdhip64. They are
   opened, not linked: they are the ones that the ranks have, and no header has to be there.
   The few functions have had the same arguments since NCCL 2.0, CUDA 8 and HIP. */

#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SMALLEST = 1024, FACTOR = 4, TRIALS = 3, FEWEST = 3, ROUNDS = 50, REPEATS = 1000 };
static const double ROUND_SECONDS = 0.01;

/* Seconds of one allreduce, and seconds since the start: all ranks know the same ones, those
   of the slowest, so that all decide alike. */
struct times { double one, elapsed; };

static double started;

/* Ends all ranks where a library returned anything but success. */
static void must(const char *what, int status)
{
    if (!status)
        return;
    fprintf(stderr, "yardstick: %s: error %d\n", what, status);
    MPI_Abort(MPI_COMM_WORLD, 3);
}

static float *of_mpi(long size)
{
    float *values = malloc(size);
    must("memory", !values);
    return memset(values, 0, size);
}

static void by_mpi(float *values, int count)
{
    MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

/* The constants of nccl.h. */
enum { NCCL_FLOAT = 7, NCCL_SUM = 0 };
typedef struct { char bytes[128]; } nccl_id;
static int (*nccl_all_reduce)(const void *, void *, size_t, int, int, void *, void *);
static int (*gpu_synchronize)(void *);
static int (*gpu_allocate)(void **, size_t);
static int (*gpu_set)(void *, int, size_t);
static void *nccl_comm, *default_stream;

static void *library(const char *path)
{
    void *opened = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!opened)
        fprintf(stderr, "yardstick: %s\n", dlerror());
    must(path, !opened);
    return opened;
}

static void *function(void *opened, const char *prefix, const char *name)
{
    char whole[64];
    snprintf(whole, sizeof whole, "%s%s", prefix, name);
    void *found = dlsym(opened, whole);
    must(whole, !found);
    return found;
}

/* Each rank takes the GPU of its number on its host, or the only one that it sees. */
static void join_nccl(const char *nccl_path, const char *runtime_path)
{
    int rank, ranks, local, seen = 0;
    MPI_Comm host;
    void *runtime = library(runtime_path), *nccl = library(nccl_path);
    const char *gpu = dlsym(runtime, "hipSetDevice") ? "hip" : "cuda";
    int (*count)(int *) = function(runtime, gpu, "GetDeviceCount");
    int (*choose)(int) = function(runtime, gpu, "SetDevice");
    int (*make_id)(nccl_id *) = function(nccl, "nccl", "GetUniqueId");
    int (*join)(void **, int, nccl_id, int) = function(nccl, "nccl", "CommInitRank");
    gpu_allocate = function(runtime, gpu, "Malloc");
    gpu_set = function(runtime, gpu, "Memset");
    gpu_synchronize = function(runtime, gpu, "StreamSynchronize");
    nccl_all_reduce = function(nccl, "nccl", "AllReduce");

    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &local);
    must("counting the GPUs", count(&seen));
    must("choosing a GPU", choose(seen == 1 ? 0 : local));
    nccl_id id;
    if (rank == 0)
        must("ncclGetUniqueId", make_id(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    must("ncclCommInitRank", join(&nccl_comm, ranks, id, rank));
}

static float *of_gpu(long size)
{
    void *values = NULL;
    must("memory of the GPU", gpu_allocate(&values, size));
    must("clearing it", gpu_set(values, 0, size));
    return values;
}

/* Each is waited for, as Horovod's synchronous allreduce does. */
static void by_nccl(float *values, int count)
{
    must("ncclAllReduce",
         nccl_all_reduce(values, values, count, NCCL_FLOAT, NCCL_SUM, nccl_comm, default_stream));
    must("waiting for the GPU", gpu_synchronize(default_stream));
}

static void (*allreduce)(float *, int) = by_mpi;

static struct times timed(float *values, int count, int repeats)
{
    double own[2], slowest[2];
    MPI_Barrier(MPI_COMM_WORLD);
    double before = MPI_Wtime();
    for (int i = 0; i < repeats; i++)
        allreduce(values, count);
    own[0] = (MPI_Wtime() - before) / repeats;
    own[1] = MPI_Wtime() - started;
    MPI_Allreduce(own, slowest, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return (struct times){slowest[0], slowest[1]};
}

/* The least of some trials, which warm up as well. */
static struct times tried(float *values, int count)
{
    struct times found = timed(values, count, 1);
    for (int i = 1; i < TRIALS; i++) {
        struct times next = timed(values, count, 1);
        found.one = next.one < found.one ? next.one : found.one;
        found.elapsed = next.elapsed;
    }
    return found;
}

static int ascending(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static void tell(long size, int ranks, double *seconds, int rounds)
{
    qsort(seconds, rounds, sizeof *seconds, ascending);
    printf("@hvdenv-yardstick {\"size\": %ld, \"ranks\": %d, \"seconds\": [", size, ranks);
    for (int quarter = 0; quarter <= 4; quarter++)
        printf("%s%.9f", quarter ? ", " : "", seconds[quarter * (rounds - 1) / 4]);
    printf("]}\n");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    int rank, ranks, sizes = 0;
    if (argc != 4 && argc != 6)
        return 2;
    double limit = atof(argv[1]), seconds[ROUNDS];
    long largest = atol(argv[2]);
    alarm((unsigned)atoi(argv[3]));
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    started = MPI_Wtime();
    if (argc == 6) {
        join_nccl(argv[4], argv[5]);
        allreduce = by_nccl;
    }
    float *values = argc == 6 ? of_gpu(largest) : of_mpi(largest);
    for (long size = SMALLEST; size <= largest; size *= FACTOR)
        sizes++;
    struct times last = {0, 0};
    double least = 0;
    for (long size = SMALLEST; size <= largest; size *= FACTOR, sizes--) {
        int count = (int)(size / sizeof(float)), rounds = 0;
        if ((TRIALS + FEWEST) * FACTOR * least > limit - last.elapsed)
            break;
        last = tried(values, count);
        least = last.one;
        double wanted = ROUND_SECONDS / last.one + 1;
        int repeats = wanted > REPEATS ? REPEATS : (int)wanted;
        double end = last.elapsed + (limit - last.elapsed) / (2 * sizes);
        while (rounds < FEWEST || (rounds < ROUNDS && last.elapsed < end)) {
            last = timed(values, count, repeats);
            seconds[rounds++] = last.one;
            least = last.one < least ? last.one : least;
        }
        if (rank == 0)
            tell(size, ranks, seconds, rounds);
    }
    MPI_Finalize();
    return 0;
}
