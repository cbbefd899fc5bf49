/* A benchmark rank of Open MPI; ../README.md describes the protocol and the method.
 *
 *     mpirun -n WORLD mpi DIR NAME
 */
#include <fcntl.h>
#include <math.h>
#include <mpi.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum op { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, OPS };

static const char *const OP_NAMES[OPS] = {"all-reduce", "reduce-scatter", "all-gather",
                                          "broadcast"};

/* A sample is as many operations as it takes to fill SAMPLE_US, LARGEST_BATCH at most: longer
 * samples would average away what a median is for, shorter ones would time the clock. */
static const double SAMPLE_US = 20.0;
static const long LARGEST_BATCH = 16;

/* All-reduce in place multiplies the values by `world` each time: from START on, they may
 * grow by GROWTH_BITS before they leave the range of f32. */
static const float START = 0x1p-100f;
static const int GROWTH_BITS = 192;

static int rank, world;

struct buffers {
    enum op op;
    long count;   /* elements of the full buffer: world * block */
    long block;   /* elements per rank in reduce-scatter and all-gather */
    float *input; /* what `refill` starts from, never overwritten */
    float *work;  /* what the operation writes */
};

static float pattern(long i) { return (float)(1 + i % 251); }

static void *allocate(long elements) {
    void *memory = malloc((elements ? elements : 1) * sizeof(float));
    if (!memory) {
        fprintf(stderr, "rank %d: out of memory\n", rank);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return memory;
}

static struct buffers buffers_new(enum op op, long bytes) {
    struct buffers b = {.op = op};
    b.block = bytes / (long)sizeof(float) / world;
    b.count = op == REDUCE_SCATTER || op == ALL_GATHER ? b.block * world
                                                       : bytes / (long)sizeof(float);
    b.input = allocate(b.count);
    b.work = allocate(b.count);
    for (long i = 0; i < b.count; i++)
        b.input[i] = START * (float)(rank + 1) * pattern(i);
    return b;
}

static void buffers_free(struct buffers *b) {
    free(b->input);
    free(b->work);
}

/* Puts back the input where the operation overwrites it, and nonsense where it must write. */
static void refill(struct buffers *b) {
    if (b->op == ALL_REDUCE || (b->op == BROADCAST && rank == 0))
        memcpy(b->work, b->input, b->count * sizeof(float));
    else
        for (long i = 0; i < b->count; i++)
            b->work[i] = -1.0f;
}

static void operate(struct buffers *b) {
    switch (b->op) {
    case ALL_REDUCE:
        MPI_Allreduce(MPI_IN_PLACE, b->work, (int)b->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case REDUCE_SCATTER:
        MPI_Reduce_scatter_block(b->input, b->work, (int)b->block, MPI_FLOAT, MPI_SUM,
                                 MPI_COMM_WORLD);
        break;
    case ALL_GATHER:
        MPI_Allgather(b->input, (int)b->block, MPI_FLOAT, b->work, (int)b->block, MPI_FLOAT,
                      MPI_COMM_WORLD);
        break;
    case BROADCAST:
        MPI_Bcast(b->work, (int)b->count, MPI_FLOAT, 0, MPI_COMM_WORLD);
        break;
    case OPS:
        break;
    }
}

/* What element `i` of the result must be; repeated all-reduces have multiplied it by `growth`. */
static double expected(const struct buffers *b, long i, double growth) {
    double total = world * (world + 1) / 2.0;
    switch (b->op) {
    case ALL_REDUCE:
        return START * total * pattern(i) * growth;
    case REDUCE_SCATTER:
        return START * total * pattern(rank * b->block + i);
    case ALL_GATHER:
        return START * (double)(i / b->block + 1) * pattern(i % b->block);
    default:
        return START * pattern(i);
    }
}

/* The first element that is off by more than the relative `tolerance`, or -1, after one
 * operation and `repeats` more. */
static long first_wrong(const struct buffers *b, long repeats, double tolerance) {
    long length = b->op == REDUCE_SCATTER ? b->block : b->count;
    double growth = pow(world, (double)repeats);
    for (long i = 0; i < length; i++) {
        double want = expected(b, i, growth);
        if (!(fabs(b->work[i] - want) <= want * tolerance))
            return i;
    }
    return -1;
}

static long min(long a, long b) { return a < b ? a : b; }

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

struct reply {
    char *text;
    size_t length, capacity;
};

static void append(struct reply *r, const char *format, ...) {
    char piece[160];
    va_list arguments;
    va_start(arguments, format);
    size_t length = (size_t)vsnprintf(piece, sizeof piece, format, arguments);
    va_end(arguments);
    if (r->length + length + 1 > r->capacity) {
        r->capacity = 2 * (r->capacity + length + 1);
        r->text = realloc(r->text, r->capacity);
        if (!r->text)
            MPI_Abort(MPI_COMM_WORLD, 1);
    }
    memcpy(r->text + r->length, piece, length + 1);
    r->length += length;
}

/* Runs one `run` line; the samples or the error go to `reply`. Every rank makes the same calls
 * whatever its checks find, so that a wrong result cannot leave the others waiting. */
static void run(enum op op, long bytes, long iterations, long warmup, struct reply *reply) {
    struct buffers b = buffers_new(op, bytes);
    int bits = 1;
    while (1 << bits < world)
        bits++;
    long stretch = GROWTH_BITS / bits;

    refill(&b);
    MPI_Barrier(MPI_COMM_WORLD);
    operate(&b);
    long wrong = first_wrong(&b, 0, 0.0);

    double fastest = SAMPLE_US;
    for (long done = 0; done < warmup; done++) {
        if (done % stretch == 0)
            refill(&b);
        double start = now_us();
        operate(&b);
        fastest = fmin(fastest, now_us() - start);
    }
    long batch = 1;
    while (batch < LARGEST_BATCH && batch * fastest < SAMPLE_US)
        batch *= 2;

    append(reply, "[");
    for (long done = 0; done < iterations;) {
        refill(&b);
        MPI_Barrier(MPI_COMM_WORLD);
        operate(&b);
        long repeats = 0;
        while (repeats < stretch && done < iterations) {
            long todo = min(batch, min(stretch - repeats, iterations - done));
            double start = now_us();
            for (long i = 0; i < todo; i++)
                operate(&b);
            append(reply, "%s%.3f", done ? "," : "", (now_us() - start) / todo);
            repeats += todo;
            done += todo;
        }
        if (wrong < 0)
            wrong = first_wrong(&b, repeats, 1e-4);
    }
    append(reply, "]\n");

    if (wrong >= 0) {
        reply->length = 0;
        append(reply, "error rank %d: wrong result at element %ld of %s\n", rank, wrong,
               OP_NAMES[op]);
    }
    buffers_free(&b);
}

static enum op parse_op(const char *name) {
    int op = 0;
    while (op < OPS && strcmp(name, OP_NAMES[op]) != 0)
        op++;
    return op;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (argc != 3) {
        fprintf(stderr, "usage: mpirun -n WORLD %s DIR NAME\n", argv[0]);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }

    char path[4096];
    snprintf(path, sizeof path, "%s/%s.%d", argv[1], argv[2], rank);
    FILE *commands = fopen(path, "r");
    snprintf(path, sizeof path, "%s/%s.out", argv[1], argv[2]);
    int answers = open(path, O_WRONLY);
    if (!commands || answers < 0) {
        perror(path);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }

    char line[256], name[32];
    struct reply reply = {0};
    while (fgets(line, sizeof line, commands) && strcmp(line, "quit\n") != 0) {
        long bytes, iterations, warmup;
        enum op op = OPS;
        reply.length = 0;
        if (sscanf(line, "run %31s %ld %ld %ld", name, &bytes, &iterations, &warmup) == 4)
            op = parse_op(name);
        if (op == OPS)
            append(&reply, "error rank %d: cannot do: %.100s", rank, line);
        else
            run(op, bytes, iterations, warmup, &reply);
        if (write(answers, reply.text, reply.length) != (ssize_t)reply.length)
            MPI_Abort(MPI_COMM_WORLD, 1);
    }
    free(reply.text);
    MPI_Finalize();
    return 0;
}
