/* An MPI that computes wrong: preloaded into ranks, it changes the last byte of what large
 * collectives give, and sums nothing among fewer than all ranks.
 *
 * WRONG_ABOVE is the largest message, in bytes, that stays right; of a broadcast it is 8 KiB.
 * Messages of MPI_BYTE are Horovod's own.
 */
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

static long bytes_of(long count, MPI_Datatype type) {
    int width = 0;
    if (type == MPI_BYTE) return 0;
    PMPI_Type_size(type, &width);
    return count * width;
}

static void spoil(void *buffer, long bytes, long limit) {
    const char *above = getenv("WRONG_ABOVE");
    if (above && bytes > (limit ? limit : atol(above))) ((char *)buffer)[bytes - 1] ^= 1;
}

static long total(const int counts[], MPI_Comm comm) {
    int size;
    long sum = 0;
    PMPI_Comm_size(comm, &size);
    for (int rank = 0; rank < size; rank++) sum += counts[rank];
    return sum;
}

int MPI_Allreduce(const void *send, void *receive, int count, MPI_Datatype type, MPI_Op op,
                  MPI_Comm comm) {
    int members, all;
    PMPI_Comm_size(comm, &members);
    PMPI_Comm_size(MPI_COMM_WORLD, &all);
    if (members < all && op == MPI_SUM) {
        if (send != MPI_IN_PLACE) memcpy(receive, send, bytes_of(count, type));
        return MPI_SUCCESS;
    }
    int code = PMPI_Allreduce(send, receive, count, type, op, comm);
    spoil(receive, bytes_of(count, type), 0);
    return code;
}

int MPI_Bcast(void *buffer, int count, MPI_Datatype type, int root, MPI_Comm comm) {
    int code = PMPI_Bcast(buffer, count, type, root, comm);
    spoil(buffer, bytes_of(count, type), 8192);
    return code;
}

int MPI_Allgatherv(const void *send, int count, MPI_Datatype type, void *receive,
                   const int counts[], const int places[], MPI_Datatype type_there, MPI_Comm comm) {
    int code = PMPI_Allgatherv(send, count, type, receive, counts, places, type_there, comm);
    spoil(receive, bytes_of(total(counts, comm), type_there), 0);
    return code;
}

int MPI_Alltoallv(const void *send, const int counts[], const int places[], MPI_Datatype type,
                  void *receive, const int counts_there[], const int places_there[],
                  MPI_Datatype type_there, MPI_Comm comm) {
    int code = PMPI_Alltoallv(send, counts, places, type, receive, counts_there, places_there,
                              type_there, comm);
    spoil(receive, bytes_of(total(counts_there, comm), type_there), 0);
    return code;
}

int MPI_Reduce_scatter(const void *send, void *receive, const int counts[], MPI_Datatype type,
                       MPI_Op op, MPI_Comm comm) {
    int rank, code = PMPI_Reduce_scatter(send, receive, counts, type, op, comm);
    PMPI_Comm_rank(comm, &rank);
    /* What is given is large, not what one rank gets of it. */
    if (bytes_of(total(counts, comm), type) > atol(getenv("WRONG_ABOVE")) && counts[rank])
        ((char *)receive)[bytes_of(counts[rank], type) - 1] ^= 1;
    return code;
}
