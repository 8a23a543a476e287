/* Chunks over a stream socket that never blocks: received bytes are verified and copied on piece by piece, sent bytes
 * are summed step by step while they are in the cache. Python waits for the socket between two calls.
 *
 * Both directions return KV_DONE, KV_BLOCKED if the caller must wait for the socket, or the negative errno. */
#define _GNU_SOURCE
#include "copying.h"
#include "native.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

#ifndef SEND_BYTES
#define SEND_BYTES (1 << 20) /* of one system call */
#endif

static int why_not(ssize_t moved) {
    if (moved >= 0) return -ECONNRESET; /* the peer closed it */
    return errno == EAGAIN || errno == EWOULDBLOCK ? KV_BLOCKED : -errno;
}

/* Fills the piece, and `header` before the first one. */
static int receive_piece(const kv_chunk *chunk, uint8_t *header, kv_arrival *arrival, int fd) {
    uint64_t before = arrival->passed ? 0 : chunk->header_bytes, length = kv_piece_bytes(chunk, arrival->passed);
    while (arrival->came < before + length) {
        uint64_t came = arrival->came, into = came > before ? came - before : 0;
        struct iovec parts[2] = {{header + came, before - came}, {kv_piece + into, length - into}};
        int skipped = came >= before;
        struct msghdr message = {.msg_iov = parts + skipped, .msg_iovlen = (size_t)(2 - skipped)};
        ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return why_not(got);
        arrival->came += (uint64_t)got;
    }
    return KV_DONE;
}

/* Receives the file of a chunk into its sections; KV_OTHER if it is not the wanted one, or not whole. After KV_BLOCKED
 * the same thread must call it again, without another call in between: the piece stays in place. */
KV_PUBLIC int kv_receive(const kv_run *run, const kv_chunk *chunk, uint8_t *header, kv_arrival *arrival, int fd) {
    while (arrival->passed < kv_payload_bytes(chunk)) {
        int status = receive_piece(chunk, header, arrival, fd);
        if (status != KV_DONE) return status;
        uint64_t length = kv_piece_bytes(chunk, arrival->passed);
        if (!arrival->passed && !KV_CHECK(received_header, kv_header_fits(run, chunk, header))) return KV_OTHER;
        int right = kv_pass(chunk, kv_table(chunk, header), NULL, &arrival->hash, arrival->passed, length, 1);
        if (!KV_CHECK(received_sum, right)) return KV_OTHER;
        arrival->passed += length;
        arrival->came = 0;
    }
    kv_copied();
    return KV_DONE;
}

/* Receives the sections, one after another and without a header, and sets `sums` to the checksum of each. Each row of
 * `parts` sections that came one after another is summed as well, into `row_sums`, unless `parts` is 1: sections of a row
 * lie anywhere, and are of whole kilobytes. Call it again as kv_receive. */
KV_PUBLIC int kv_receive_rows(const kv_chunk *chunk, uint32_t parts, uint64_t *sums, uint64_t *row_sums,
                              kv_rows_arrival *arrival, int fd) {
    const kv_chunk rows = {.section_bytes = parts * chunk->section_bytes, .section_count = chunk->section_count / parts};
    kv_arrival *sections = &arrival->sections;
    while (sections->passed < kv_payload_bytes(chunk)) {
        int status = receive_piece(chunk, NULL, sections, fd);
        if (status != KV_DONE) return status;
        uint64_t at = sections->passed, length = kv_piece_bytes(chunk, at);
        kv_pass(chunk, NULL, sums, &sections->hash, at, length, 1);
        if (parts > 1) kv_pass(&rows, NULL, row_sums, &arrival->row, at, length, 0);
        sections->passed += length;
        sections->came = 0;
    }
    kv_copied();
    return KV_DONE;
}

/* Sends the sections, one after another, and sets `sums` to the checksum of each. Bytes are summed just after they are
 * sent, when the kernel's copy has brought them into the cache. */
KV_PUBLIC int kv_send(const kv_chunk *chunk, uint64_t *sums, kv_departure *departure, int fd) {
    struct iovec parts[KV_IOV_MAX];
    uint64_t payload = kv_payload_bytes(chunk);
    while (departure->sent < payload) {
        uint64_t start = departure->sent, stop = payload - start < SEND_BYTES ? payload : start + SEND_BYTES;
        int count = kv_vectors(chunk, start, stop, parts, KV_IOV_MAX);
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        ssize_t went = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (went < 0 && errno == EINTR) continue;
        if (went <= 0) return why_not(went);
        departure->sent += (uint64_t)went;
        kv_sum(chunk, sums, &departure->hash, start, departure->sent);
    }
    return KV_DONE;
}
