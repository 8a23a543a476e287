/* Puts a run of chunks: looks for each, writes missing ones under their staging names, and publishes them (rule W1).
 *
 * Pieces are hashed just after they are written, while they are in the cache; the header, which has the checksums, is
 * written last. */
#define _GNU_SOURCE
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef WRITE_BYTES
#define WRITE_BYTES (512 << 10)
#endif

/* As in root/posix.py: others may not read, and the umask takes away more. */
#define KV_FILE_MODE 0660
#define KV_FOLDER_MODE 0770

/* Writes bytes of the payload from `at` up to `stop`. */
static int write_part(const kv_chunk *chunk, int fd, uint64_t at, uint64_t stop) {
    struct iovec parts[KV_IOV_MAX];
    while (at < stop) {
        int count = kv_vectors(chunk, at, stop, parts, KV_IOV_MAX);
        ssize_t wrote = pwritev(fd, parts, count, (off_t)(chunk->header_bytes + at));
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) return 0;
        at += (uint64_t)wrote;
    }
    return 1;
}

/* True if the sections, which have the checksums in `table`, are those of an image that is right. Bytes that changed in
 * memory would get new checksums, and pass as right ever after. */
static int is_of_image(const kv_run *run, const kv_chunk *chunk, const uint64_t *table) {
    const uint8_t *image = kv_section(chunk, 0) - chunk->header_bytes;
    return KV_CHECK(staged_image_header, kv_header_fits(run, chunk, image)) &&
           KV_CHECK(staged_image_sums, !memcmp(table, kv_table(chunk, image), chunk->section_count * sizeof *table));
}

/* Writes a whole chunk file into `fd`, which is empty. */
static int write_chunk(const kv_run *run, const kv_chunk *chunk, int fd, uint8_t *header) {
    uint64_t payload = kv_payload_bytes(chunk), at = 0;
    uint64_t *table = (uint64_t *)kv_table(chunk, header);
    kv_hash hash;
    kv_header_begin(run, chunk, header);
    while (at < payload) {
        uint64_t stop = payload - at < WRITE_BYTES ? payload : at + WRITE_BYTES;
        if (!write_part(chunk, fd, at, stop)) return 0;
        kv_sum(chunk, table, &hash, at, stop);
        at = stop;
    }
    if (run->from_images && !is_of_image(run, chunk, table)) return 0;
    kv_header_end(chunk, header);
    return pwrite(fd, header, chunk->header_bytes, 0) == (ssize_t)chunk->header_bytes;
}

/* Looks for the final names. KV_ABSENT: a put stages it. KV_FOUND: a file of the right size, or of any if the chunk's
 * `header_bytes` are 0, with its mtime. */
KV_PUBLIC void kv_look(const kv_run *run, kv_chunk *chunks, int64_t count) {
    for (kv_chunk *chunk = chunks; chunk < chunks + count; chunk++) {
        char path[KV_PATH_MAX];
        struct stat found;
        chunk->status = KV_OTHER;
        if (!kv_chunk_path(run, chunk, path)) continue;
        if (lstat(path, &found)) {
            if (errno == ENOENT) chunk->status = KV_ABSENT;
        } else if (S_ISREG(found.st_mode) &&
                   KV_CHECK(looked_size, !chunk->header_bytes || (uint64_t)found.st_size ==
                                             chunk->header_bytes + kv_payload_bytes(chunk))) {
            chunk->mtime_ns = found.st_mtim.tv_sec * 1000000000LL + found.st_mtim.tv_nsec;
            chunk->status = KV_FOUND;
        }
    }
}

static int stage_one(const kv_run *run, const kv_chunk *chunk, uint8_t *header) {
    char path[KV_PATH_MAX];
    if (!kv_staged_path(run, chunk, path)) return KV_OTHER;
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, KV_FILE_MODE);
    if (fd < 0) return KV_OTHER;
    struct timespec stamp = {chunk->mtime_ns / 1000000000LL, chunk->mtime_ns % 1000000000LL}, times[2] = {stamp, stamp};
    int whole = write_chunk(run, chunk, fd, header) && !futimens(fd, times) && (!run->durable || !fsync(fd));
    /* A network file system may report a full disk only here. */
    if (close(fd)) whole = 0;
    whole = KV_CHECK(staged_whole, whole);
    if (!whole) unlink(path);
    return whole ? KV_DONE : KV_OTHER;
}

/* Publishes as Python does, except for cases that need a decision: a name that is taken, a root that is full or gone.
 * It makes a shard's folder only inside the folder of shards, which the bare mount point of an unmounted root does not
 * have. */
static int publish_one(const kv_run *run, const kv_chunk *chunk) {
    char staged[KV_PATH_MAX], path[KV_PATH_MAX];
    if (!kv_staged_path(run, chunk, staged) || !kv_chunk_path(run, chunk, path)) return 0;
    if (link(staged, path)) {
        char *name = strrchr(path, '/');
        if (errno != ENOENT) return 0;
        *name = 0;
        int made = !mkdir(path, KV_FOLDER_MODE) || errno == EEXIST;
        *name = '/';
        if (!made || link(staged, path)) return 0;
    }
    return !unlink(staged) || errno == ENOENT;
}

/* Gives the chunks at `count` places their final names if they are staged, KV_DONE: they become KV_PUBLISHED. The
 * others stay staged; an `ordered` call ends with the first of them. */
KV_PUBLIC void kv_publish(const kv_run *run, kv_chunk *chunks, const int32_t *places, int64_t count, int ordered) {
    for (const int32_t *place = places; place < places + count; place++) {
        kv_chunk *chunk = chunks + *place;
        if (chunk->status == KV_DONE && publish_one(run, chunk)) chunk->status = KV_PUBLISHED;
        if (ordered && chunk->status != KV_PUBLISHED) return;
    }
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Looks for `many` chunks from `first` on, and stages those that are KV_ABSENT. */
static void stage_step(const kv_run *run, kv_chunk *chunks, int64_t first, int64_t many, kv_turn *turn, uint8_t *header) {
    kv_look(run, chunks + first, many);
    for (int64_t at = first; at < first + many; at++) {
        turn->reported[turn->reported_count++] = (int32_t)at;
        if (chunks[at].status != KV_ABSENT) continue;
        chunks[at].status = header ? stage_one(run, chunks + at, header) : KV_OTHER;
        if (chunks[at].status == KV_DONE) turn->bytes += chunks[at].section_count * chunks[at].section_bytes;
    }
}

/* Looks for chunks that no other thread took, a few at a time, and stages those that are KV_ABSENT. Complete ones get
 * KV_DONE; the others leave nothing behind. A turn that may publishes each few before it takes the next: what was staged
 * before the put was abandoned has the bytes that the caller meant. Returns 0 once none is left to be done, 1 when the
 * turn is over. */
KV_PUBLIC int kv_stage_turn(const kv_run *run, kv_chunk *chunks, int64_t count, kv_turn *turn) {
    uint8_t *header = malloc((size_t)turn->header_bytes);
    int64_t ends_ns = now_ns() + turn->time_ns;
    int more = 1;
    turn->bytes = turn->reported_count = 0;
    do {
        int64_t first, many = kv_take_step(turn, count, &first);
        const int32_t *staged = turn->reported + turn->reported_count;
        stage_step(run, chunks, first, many, turn, header);
        more = many > 0;
        if (!turn->abandoned) continue;
        if (KV_CHECK(put_goes_on, !__atomic_load_n(turn->abandoned, __ATOMIC_SEQ_CST)))
            kv_publish(run, chunks, staged, many, 0);
        else
            more = 0;
    } while (more && turn->reported_count < turn->most && now_ns() < ends_ns);
    free(header);
    return more;
}
