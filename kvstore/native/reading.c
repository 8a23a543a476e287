/* Reads a run of chunks: opens them, then reads and verifies each while it is in the processor's cache.
 *
 * Opening may block on a dead mount, so it is a separate call, before any thread has permission to write into the
 * caller's memory. `kv_read` never waits for a device; `kv_read_cold` does, and reads into memory of ours. */
#define _GNU_SOURCE
#include "copying.h"
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define STRAIGHT_BYTES_MIN (64 << 10)

#ifndef RWF_NOWAIT
#define RWF_NOWAIT 8
#endif

/* True if the caller's memory may be written to, until ``leave``. */
static int enter(kv_borrowed *borrowed) {
    __atomic_add_fetch(&borrowed->users, 1, __ATOMIC_SEQ_CST);
    if (KV_CHECK(withdrawn, !__atomic_load_n(&borrowed->stop, __ATOMIC_SEQ_CST))) return 1;
    __atomic_sub_fetch(&borrowed->users, 1, __ATOMIC_SEQ_CST);
    return 0;
}

static void leave(kv_borrowed *borrowed) { __atomic_sub_fetch(&borrowed->users, 1, __ATOMIC_SEQ_CST); }

/* Takes the memory back: no thread may begin to write any more. Returns how many are still writing. */
KV_PUBLIC int kv_withdraw(kv_borrowed *borrowed) {
    __atomic_store_n(&borrowed->stop, 1, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&borrowed->users, __ATOMIC_SEQ_CST);
}

static int is_missing(int error) {
    return error == ENOENT || error == ESTALE || error == ENOTCONN || error == ENOTDIR || error == ELOOP;
}

KV_PUBLIC void kv_close(kv_chunk *chunks, int64_t count) {
    for (kv_chunk *chunk = chunks; chunk < chunks + count; chunk++) {
        if (chunk->fd >= 0) close(chunk->fd);
        chunk->fd = -1;
    }
}

/* Opens the files; a chunk whose file is missing or has another size gets a status and no descriptor. */
KV_PUBLIC void kv_open(const kv_run *run, kv_chunk *chunks, int64_t count) {
    for (kv_chunk *chunk = chunks; chunk < chunks + count; chunk++) {
        char path[KV_PATH_MAX];
        struct stat found;
        chunk->fd = -1;
        chunk->status = KV_OTHER;
        if (!kv_chunk_path(run, chunk, path)) continue;
        chunk->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
        if (chunk->fd < 0) {
            if (is_missing(errno)) chunk->status = KV_ABSENT;
            continue;
        }
        if (!fstat(chunk->fd, &found) && S_ISREG(found.st_mode) &&
            KV_CHECK(opened_size, (uint64_t)found.st_size == chunk->header_bytes + kv_payload_bytes(chunk))) {
            chunk->mtime_ns = found.st_mtim.tv_sec * 1000000000LL + found.st_mtim.tv_nsec;
            chunk->status = KV_BLOCKED;
        } else {
            kv_close(chunk, 1);
        }
    }
}

/* Reads `size` bytes of the file from `offset` on into the piece, and before them the header unless that is NULL;
 * returns a status. */
static int fill(const kv_chunk *chunk, uint8_t *header, uint64_t size, uint64_t offset, int flags) {
    uint64_t before = header ? chunk->header_bytes : 0;
    for (uint64_t done = 0; done < before + size;) {
        uint64_t into = done > before ? done - before : 0;
        struct iovec parts[2] = {{header + done, before - done}, {kv_piece + into, size - into}};
        int skipped = done >= before;
        ssize_t got = preadv2(chunk->fd, parts + skipped, 2 - skipped, (off_t)(offset + done), flags);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno == EAGAIN || errno == EOPNOTSUPP || errno == EINVAL ? KV_BLOCKED : KV_OTHER;
        /* Linux 5.9 and 5.10 say 0 in the middle of a file too, unless the read may wait. */
        if (!got) return KV_CHECK(read_in_full, 0) ? KV_DONE : flags & RWF_NOWAIT ? KV_BLOCKED : KV_OTHER;
        done += (uint64_t)got;
    }
    return KV_DONE;
}

/* Sets where the next bytes of a file from `at` on go, up to about PIECE_BYTES; returns how many vectors were set. */
static int vectors(const kv_chunk *chunk, uint8_t *header, uint64_t at, struct iovec parts[KV_IOV_MAX]) {
    uint64_t before = chunk->header_bytes, start = at > before ? at - before : 0, stop = kv_payload_bytes(chunk);
    int count = at < before;
    if (count) *parts = (struct iovec){header + at, before - at};
    if (stop > start + PIECE_BYTES) stop = start + PIECE_BYTES;
    return count + kv_vectors(chunk, start, stop, parts + count, KV_IOV_MAX - count);
}

/* Whether memory is read into straight, where it is aligned. That costs more than a piece on Intel, and less on a Zen 4
 * (docs/performance-notes.md). */
static int use_straight;

/* Chooses whether to read straight: 1, 0, or what suits this processor if negative. Returns what is in use. */
KV_PUBLIC int kv_use_straight(int wanted) {
    use_straight = wanted > 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (wanted < 0) use_straight = __builtin_cpu_is("amd") != 0;
#endif
    return use_straight;
}

__attribute__((constructor)) static void choose(void) { kv_use_straight(-1); }

/* True if all sections begin on cache lines, in the file as in memory, and are large enough to be named one by one. */
static int is_aligned(const kv_chunk *chunk) {
    if (chunk->section_bytes < STRAIGHT_BYTES_MIN || chunk->section_bytes % KV_LINE) return 0;
    for (uint32_t section = 0; section < chunk->section_count; section++)
        if ((uintptr_t)kv_section(chunk, section) % KV_LINE) return 0;
    return 1;
}

/* Reads a file from `offset` on straight into its sections, and verifies it; a header of 0 bytes is not read.
 *
 * The first bytes are in their sections before the header is verified, which a miss may do. Other threads may
 * write into that memory during the read. So KV_OTHER says nothing about the file: read it through pieces then. */
static int read_straight(const kv_run *run, const kv_chunk *chunk, uint8_t *header, const uint64_t *table,
                         uint64_t offset, int flags) {
    struct iovec parts[KV_IOV_MAX];
    kv_verified verified = {.section = 0};
    for (uint64_t done = 0, size = chunk->header_bytes + kv_payload_bytes(chunk); done < size;) {
        int count = vectors(chunk, header, done, parts), began = done < chunk->header_bytes;
        ssize_t got = preadv2(chunk->fd, parts, count, (off_t)(offset + done), flags);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got && errno == EAGAIN ? KV_BLOCKED : KV_OTHER;
        done += (uint64_t)got;
        if (done < chunk->header_bytes) continue;
        if (began && !KV_CHECK(straight_header, kv_header_fits(run, chunk, header))) return KV_OTHER;
        if (!KV_CHECK(straight_sums, kv_verify(chunk, table, &verified, done - chunk->header_bytes))) return KV_OTHER;
    }
    return KV_DONE;
}

/* Reads and verifies one file; brings it into its sections if it is `taken`. */
static int read_file(const kv_run *run, const kv_chunk *chunk, uint8_t *header, int flags, int taken) {
    if (taken && use_straight && is_aligned(chunk)) {
        int status = read_straight(run, chunk, header, kv_table(chunk, header), 0, flags);
        if (status != KV_OTHER) return status;
    }
    uint64_t payload = kv_payload_bytes(chunk), length = kv_piece_bytes(chunk, 0);
    int status = fill(chunk, header, length, 0, flags);
    if (status == KV_DONE && !KV_CHECK(file_header, kv_header_fits(run, chunk, header))) status = KV_OTHER;
    kv_hash hash;
    for (uint64_t at = 0; status == KV_DONE && at < payload;) {
        int right = kv_pass(chunk, kv_table(chunk, header), NULL, &hash, at, length, taken);
        if (!(at ? KV_CHECK(file_later_piece, right) : KV_CHECK(file_first_piece, right))) return KV_OTHER;
        at += length;
        length = kv_piece_bytes(chunk, at);
        if (at < payload) status = fill(chunk, NULL, length, chunk->header_bytes + at, flags);
    }
    return status;
}

/* True if the file may be read without waiting: with direct reads, only if it is cached. It asks for one page only,
 * because the kernel begins to read uncached pages that are asked for into the cache. */
static int may_read(const kv_run *run, const kv_chunk *chunk) {
    if (!run->direct || run->may_wait) return 1;
    posix_fadvise(chunk->fd, 0, 0, POSIX_FADV_RANDOM);
    return fill(chunk, NULL, 4096, 0, RWF_NOWAIT) == KV_DONE;
}

/* Reads the opened chunks into their sections, as far as that needs no device, and closes those that are done. Begins
 * none once `stop` is not 0. */
static void read_files(const kv_run *run, kv_chunk *chunks, int64_t count, uint8_t *header, const int32_t *stop) {
    int flags = run->may_wait ? 0 : RWF_NOWAIT;
    for (kv_chunk *chunk = chunks; chunk < chunks + count; chunk++) {
        if (chunk->fd < 0) continue;
        if (!header || !KV_CHECK(not_stopped, !__atomic_load_n(stop, __ATOMIC_RELAXED)))
            chunk->status = KV_OTHER;
        else
            chunk->status = may_read(run, chunk) ? read_file(run, chunk, header, flags, 1) : KV_BLOCKED;
        if (chunk->status != KV_BLOCKED) kv_close(chunk, 1);
    }
    kv_copied();
}

/* Returns how many are still open, KV_BLOCKED. */
KV_PUBLIC int64_t kv_read(const kv_run *run, kv_chunk *chunks, int64_t count, const kv_borrowed *borrowed) {
    uint8_t *header = malloc(kv_largest_header(chunks, count));
    read_files(run, chunks, count, header, &borrowed->stop);
    free(header);
    int64_t blocked_count = 0;
    for (kv_chunk *chunk = chunks; chunk < chunks + count; chunk++) blocked_count += chunk->fd >= 0;
    return blocked_count;
}

/* Opens and reads chunks that no other thread took, a few at a time. Returns 0 when none is left, 1 when the turn is over
 * or a chunk needs Python, -1 once the caller wants its memory back.
 *
 * Opening may block, so each time it asks for permission to write after opening. */
KV_PUBLIC int kv_read_turn(const kv_run *run, kv_chunk *chunks, int64_t count, kv_turn *turn, kv_borrowed *borrowed) {
    uint8_t *header = malloc((size_t)turn->header_bytes);
    int64_t blocked_count = 0;
    int outcome = 1;
    turn->reported_count = 0;
    turn->bytes = 0;
    for (int64_t took = 0; took < turn->most && turn->reported_count == blocked_count &&
                           KV_CHECK(files_bounded, blocked_count + turn->step <= turn->files);) {
        int64_t first, many = kv_take_step(turn, count, &first);
        if (!many) {
            outcome = 0;
            break;
        }
        kv_open(run, chunks + first, many);
        if (!enter(borrowed)) {
            kv_close(chunks + first, many);
            outcome = -1;
            break;
        }
        read_files(run, chunks + first, many, header, &borrowed->stop);
        leave(borrowed);
        took += many;
        for (int64_t at = first; at < first + many; at++) {
            if (chunks[at].status == KV_DONE) {
                turn->bytes += kv_payload_bytes(chunks + at);
                continue;
            }
            turn->reported[turn->reported_count++] = (int32_t)at;
            blocked_count += chunks[at].status == KV_BLOCKED;
        }
    }
    free(header);
    return outcome;
}

/* Files mapped for reading, as DLPack tensors of bytes (DLManagedTensor of dlpack.h, before version 1): numpy owns
 * them, and calls `release` when neither they nor any slice of them lives.
 *
 * That call is plain C. In Python it would be a finalizer, which the garbage collector can start in the middle of
 * anything, and which a signal's handler can break off. */
struct kv_mapping {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
    void *context;
    void (*release)(kv_mapping *mapping);
    /* Fields of ours from here on. */
    void *start;
    uint64_t size;
    int64_t bytes;
};

enum { ON_CPU = 1, UNSIGNED = 1 };

/* A quarter of the mappings that Linux allows a process (vm.max_map_count): the engine's allocators need mappings as
 * well. */
static int64_t mapped_most = 16384;
static int64_t mapped_count;

/* Sets how many files may be mapped at the same time, unless `most` is negative; returns how many are. */
KV_PUBLIC int64_t kv_map_at_most(int64_t most) {
    if (most >= 0) __atomic_store_n(&mapped_most, most, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&mapped_count, __ATOMIC_SEQ_CST);
}

static void unmap(kv_mapping *mapping) {
    munmap(mapping->start, mapping->size);
    free(mapping);
    __atomic_sub_fetch(&mapped_count, 1, __ATOMIC_SEQ_CST);
}

/* Maps a file of `size` bytes, to read those from `first` on; NULL if it cannot be mapped, or too many files are. */
static kv_mapping *map_file(int fd, uint64_t size, uint64_t first) {
    int64_t count = __atomic_add_fetch(&mapped_count, 1, __ATOMIC_SEQ_CST);
    struct stat found;
    void *start = MAP_FAILED;
    /* Accessing a page behind the end of a file kills the process (SIGBUS). */
    if (KV_CHECK(maps_bounded, count <= __atomic_load_n(&mapped_most, __ATOMIC_SEQ_CST)) && !fstat(fd, &found) &&
        (uint64_t)found.st_size == size)
        start = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    kv_mapping *mapping = start == MAP_FAILED ? NULL : malloc(sizeof *mapping);
    if (!mapping) {
        if (start != MAP_FAILED) munmap(start, size);
        __atomic_sub_fetch(&mapped_count, 1, __ATOMIC_SEQ_CST);
        return NULL;
    }
    *mapping = (kv_mapping){
        .data = (uint8_t *)start + first, .device_type = ON_CPU, .ndim = 1, .type_code = UNSIGNED, .type_bits = 8,
        .type_lanes = 1, .shape = &mapping->bytes, .release = unmap, .start = start, .size = size,
        .bytes = (int64_t)(size - first),
    };
    return mapping;
}

/* Verifies chunks and maps the sections of those that are right: sets `mapped` to a mapping of each, or NULL. May wait
 * for the device. It verifies through a small buffer, which costs less than going through the mapping, page by page. */
KV_PUBLIC void kv_map_files(const kv_run *run, kv_chunk *chunks, int64_t count, kv_mapping **mapped) {
    uint8_t *header = malloc(kv_largest_header(chunks, count));
    for (kv_chunk *chunk = chunks; chunk < chunks + count; chunk++, mapped++) {
        *mapped = NULL;
        kv_open(run, chunk, 1);
        if (chunk->fd < 0) continue;
        posix_fadvise(chunk->fd, 0, 0, POSIX_FADV_WILLNEED);
        chunk->status = header ? read_file(run, chunk, header, 0, 0) : KV_OTHER;
        uint64_t size = chunk->header_bytes + kv_payload_bytes(chunk);
        if (chunk->status == KV_DONE) *mapped = map_file(chunk->fd, size, chunk->header_bytes);
        if (!*mapped) chunk->status = KV_OTHER;
        kv_close(chunk, 1);
    }
    free(header);
}

/* Makes the device read a file whose bytes are wanted again soon. */
static int blocked(const kv_run *run, const kv_chunk *chunk, int status) {
    if (status == KV_BLOCKED && !run->direct) posix_fadvise(chunk->fd, 0, 0, POSIX_FADV_WILLNEED);
    return status;
}

/* For reads of some sections at a time. In these three functions `images` has the address of each chunk that is in
 * memory, and 0 for the others, and `tables` the checksums of each chunk, one after another. Opens the files that are
 * not open, and verifies their headers, and those of open files with KV_FOUND; a chunk that can then be read gets
 * KV_DONE. May block in `open`, as kv_open, and where it reads the header of a file that was open. */
KV_PUBLIC void kv_open_parts(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images, uint64_t *tables) {
    uint8_t *header = malloc(kv_largest_header(chunks, count));
    for (kv_chunk *chunk = chunks; chunk < chunks + count; tables += chunk->section_count, images++, chunk++) {
        if (*images || (chunk->fd >= 0 && chunk->status != KV_FOUND)) {
            chunk->status = KV_DONE;
            continue;
        }
        int waits = run->may_wait || chunk->fd >= 0; /* a file that is closed now could not be opened once more */
        if (chunk->fd < 0) {
            chunk->status = KV_OTHER;
            if (*run->root) kv_open(run, chunk, 1); /* without a root there are only files that were given */
        }
        if (chunk->fd < 0) continue;
        chunk->status = header ? blocked(run, chunk, fill(chunk, header, 0, 0, waits ? 0 : RWF_NOWAIT)) : KV_OTHER;
        if (chunk->status == KV_DONE && !KV_CHECK(parts_header, kv_header_fits(run, chunk, header)))
            chunk->status = KV_OTHER;
        if (chunk->status == KV_DONE)
            memcpy(tables, kv_table(chunk, header), chunk->section_count * sizeof *tables);
        else
            kv_close(chunk, 1);
    }
    free(header);
}

static int read_part(const kv_run *run, const kv_chunk *chunk, const uint64_t *table, uint32_t first, uint32_t many) {
    kv_chunk part = *chunk;
    part.section_count = many;
    part.header_bytes = 0;
    uint64_t offset = chunk->header_bytes + first * chunk->section_bytes, payload = kv_payload_bytes(&part);
    if (use_straight && is_aligned(&part)) {
        int status = read_straight(run, &part, NULL, table + first, offset, run->may_wait ? 0 : RWF_NOWAIT);
        if (status != KV_OTHER) return status;
    }
    kv_hash hash;
    for (uint64_t at = 0, length; at < payload; at += length) {
        length = kv_piece_bytes(&part, at);
        int status = fill(&part, NULL, length, offset + at, run->may_wait ? 0 : RWF_NOWAIT);
        if (status != KV_DONE) return status;
        int right = kv_pass(&part, table + first, NULL, &hash, at, length, 1);
        if (!(at ? KV_CHECK(part_later_piece, right) : KV_CHECK(part_first_piece, right))) return KV_OTHER;
    }
    return KV_DONE;
}

/* Reads `many` sections from `first` on of each chunk that has KV_DONE, to where its structure puts sections 0 and
 * following. Chunks that are right keep KV_DONE. */
KV_PUBLIC void kv_read_parts(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images,
                             const uint64_t *tables, uint32_t first, uint32_t many) {
    for (kv_chunk *chunk = chunks; chunk < chunks + count; tables += chunk->section_count, images++, chunk++) {
        if (chunk->status != KV_DONE) continue;
        if (*images)
            chunk->status = kv_take_part(chunk, (const uint8_t *)(uintptr_t)*images, tables, first, many);
        else
            chunk->status = read_part(run, chunk, tables, first, many);
    }
    kv_copied();
}

/* Makes one blocking read of up to `size` bytes from `offset` on; returns how many came, or -1. */
KV_PUBLIC int64_t kv_read_cold(int fd, uint8_t *memory, uint64_t size, uint64_t offset) {
    uint64_t done = 0;
    while (done < size) {
        ssize_t got = pread(fd, memory + done, size - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (!got) break;
        done += (uint64_t)got;
        if (got % 4096) break; /* the end of the file: after it direct reads would be misaligned */
    }
    return (int64_t)done;
}

/* Makes reads of this file go around the page cache from now on; false if that is impossible. */
KV_PUBLIC int kv_read_direct(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && !fcntl(fd, F_SETFL, flags | O_DIRECT);
}

/* Takes `size` bytes of a file, from `offset` on, out of `memory`: the header into `header`, the rest into the
 * sections. Verifies sections that are whole by then. Pieces must come in order. Returns a status: KV_DONE while all is
 * right. */
KV_PUBLIC int kv_take(const kv_run *run, const kv_chunk *chunk, uint8_t *header, kv_verified *verified,
                      const uint8_t *memory, uint64_t size, uint64_t offset) {
    uint64_t done = 0;
    struct iovec parts[KV_IOV_MAX];
    while (done < size) {
        int count = vectors(chunk, header, offset + done, parts), began = offset + done < chunk->header_bytes;
        if (!count) return KV_OTHER;
        for (int at = 0; at < count && done < size; at++) {
            uint64_t length = parts[at].iov_len < size - done ? parts[at].iov_len : size - done;
            memcpy(parts[at].iov_base, memory + done, length);
            done += length;
        }
        if (offset + done < chunk->header_bytes) continue;
        if (began && !KV_CHECK(taken_header, kv_header_fits(run, chunk, header))) return KV_OTHER;
        if (!kv_verify(chunk, kv_table(chunk, header), verified, offset + done - chunk->header_bytes)) return KV_OTHER;
    }
    return KV_DONE;
}
