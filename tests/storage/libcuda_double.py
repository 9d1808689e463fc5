"""A CUDA driver of one C file: enough of libcuda for kvikio to run on a machine without a GPU.

kvikio asks the driver of every pointer whether it is host memory, so that it cannot even read a
file without one. Until `zinf_double_device` is called, every entry says "not initialized", which
kvikio takes to mean host memory. After it there is one device whose memory the CPU cannot touch
(its pages are protected; the double reaches them through a second mapping) and whose copies
happen no earlier than the stream is synchronized, so that a copy nobody waited for shows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

LIBRARY = "libcuda.so.1"

NOT_USED = (
    "cuCtxCreate", "cuCtxDestroy", "cuDeviceGetAttribute", "cuEventCreate", "cuEventDestroy",
    "cuEventQuery", "cuEventRecord", "cuEventSynchronize", "cuGetProcAddress", "cuLaunchHostFunc",
)  # fmt: skip
"""Entries that kvikio looks up and, for files, never calls."""

SOURCE = r"""
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_DEVICE_POINTER = 3 };
enum { MEMORY_TYPE_HOST = 1, MEMORY_TYPE_DEVICE = 2 };

typedef uintptr_t address;
typedef struct copy { void *dst; const void *src; size_t n; struct copy *next; } copy;
typedef struct { copy *first, **last; } stream;

static char *device, *shadow;
static size_t device_nbytes;
static int context;
static _Thread_local void *current;
static long num_copies;

#define EXPORT(name, ...) \
    int name(__VA_ARGS__); int name##_v2(__VA_ARGS__) __attribute__((alias(#name))); \
    int name##_v3(__VA_ARGS__) __attribute__((alias(#name))); \
    int name##_v4(__VA_ARGS__) __attribute__((alias(#name))); int name(__VA_ARGS__)

void *zinf_double_device(size_t nbytes) {
    int fd = memfd_create("device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)nbytes)) return NULL;
    shadow = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    device = mmap(NULL, nbytes, PROT_NONE, MAP_SHARED, fd, 0);
    close(fd);
    if (shadow == MAP_FAILED || device == MAP_FAILED) return NULL;
    device_nbytes = nbytes;
    return device;
}
void *zinf_double_shadow(void) { return shadow; }
long zinf_double_num_copies(void) { return __atomic_load_n(&num_copies, __ATOMIC_SEQ_CST); }

static int on_device(address p) {
    return device && p >= (address)device && p < (address)device + device_nbytes;
}

EXPORT(cuInit, unsigned flags) { return device ? SUCCESS : NOT_INITIALIZED; }
EXPORT(cuDriverGetVersion, int *version) { *version = 13000; return SUCCESS; }
EXPORT(cuGetErrorName, int status, const char **text) { *text = "double"; return SUCCESS; }
EXPORT(cuGetErrorString, int status, const char **text) { *text = "refused"; return SUCCESS; }
EXPORT(cuDeviceGetCount, int *count) { *count = device ? 1 : 0; return SUCCESS; }
EXPORT(cuDeviceGet, int *found, int ordinal) { *found = 0; return SUCCESS; }
EXPORT(cuDevicePrimaryCtxRetain, void **found, int ordinal) { *found = &context; return SUCCESS; }
EXPORT(cuDevicePrimaryCtxRelease, int ordinal) { return SUCCESS; }
EXPORT(cuCtxGetCurrent, void **found) { *found = current; return SUCCESS; }
EXPORT(cuCtxGetDevice, int *found) { *found = 0; return SUCCESS; }
EXPORT(cuCtxPushCurrent, void *pushed) { current = pushed; return SUCCESS; }
EXPORT(cuCtxPopCurrent, void **popped) { *popped = current; current = NULL; return SUCCESS; }

EXPORT(cuPointerGetAttribute, void *out, int attribute, address p) {
    if (!device) return NOT_INITIALIZED;
    if (attribute == ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)out = on_device(p) ? MEMORY_TYPE_DEVICE : 0;
    else if (!on_device(p))
        return INVALID_VALUE;
    else if (attribute == ATTRIBUTE_CONTEXT)
        *(void **)out = &context;
    else if (attribute == ATTRIBUTE_DEVICE_POINTER)
        *(address *)out = p;
    else
        return INVALID_VALUE;
    return SUCCESS;
}
EXPORT(cuPointerGetAttributes, unsigned n, int *attributes, void **out, address p) {
    for (unsigned i = 0; i < n; i++) {
        int status = cuPointerGetAttribute(out[i], attributes[i], p);
        if (status) return status;
    }
    return SUCCESS;
}
EXPORT(cuMemGetAddressRange, address *base, size_t *nbytes, address p) {
    if (!on_device(p)) return device ? INVALID_VALUE : NOT_INITIALIZED;
    if (base) *base = (address)device;
    if (nbytes) *nbytes = device_nbytes;
    return SUCCESS;
}
EXPORT(cuMemHostAlloc, void **p, size_t nbytes, unsigned flags) {
    *p = aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    return *p ? SUCCESS : 2;
}
EXPORT(cuMemFreeHost, void *p) { free(p); return SUCCESS; }
EXPORT(cuMemHostRegister, void *p, size_t nbytes, unsigned flags) { return SUCCESS; }
EXPORT(cuMemHostUnregister, void *p) { return SUCCESS; }

EXPORT(cuStreamCreate, stream **made, unsigned flags) {
    *made = calloc(1, sizeof(stream));
    (*made)->last = &(*made)->first;
    return SUCCESS;
}
EXPORT(cuStreamDestroy, stream *s) { free(s); return SUCCESS; }
EXPORT(cuStreamSynchronize, stream *s) {
    if (!s) return SUCCESS;
    while (s->first) {
        copy *c = s->first;
        memcpy(c->dst, c->src, c->n);
        __atomic_add_fetch(&num_copies, 1, __ATOMIC_SEQ_CST);
        s->first = c->next;
        free(c);
    }
    s->last = &s->first;
    return SUCCESS;
}
static void *reach(address p) { return on_device(p) ? shadow + (p - (address)device) : (void *)p; }
static int enqueue(stream *s, address dst, address src, size_t n) {
    if (!s || (!on_device(dst) && !on_device(src))) return INVALID_VALUE;
    copy *c = malloc(sizeof(copy));
    *c = (copy){reach(dst), reach(src), n, NULL};
    *s->last = c;
    s->last = &c->next;
    return SUCCESS;
}
EXPORT(cuMemcpyAsync, address dst, address src, size_t n, stream *s) {
    return enqueue(s, dst, src, n);
}
EXPORT(cuMemcpyHtoDAsync, address dst, address src, size_t n, stream *s) {
    return enqueue(s, dst, src, n);
}
EXPORT(cuMemcpyDtoHAsync, address dst, address src, size_t n, stream *s) {
    return enqueue(s, dst, src, n);
}
int cuMemcpyBatchAsync_v2(address *dst, address *src, size_t *n, size_t count, void *attributes,
                          size_t *attribute_of, size_t num_attributes, stream *s) {
    int status = SUCCESS;
    for (size_t i = 0; i < count && !status; i++) status = enqueue(s, dst[i], src[i], n[i]);
    return status;
}
int cuMemcpyBatchAsync(address *dst, address *src, size_t *n, size_t count, void *attributes,
                       size_t *attribute_of, size_t num_attributes, size_t *failed, stream *s) {
    return cuMemcpyBatchAsync_v2(dst, src, n, count, attributes, attribute_of, num_attributes, s);
}
"""


def build_double(folder: Path) -> Path:
    """Compile the double to `folder`, for LD_LIBRARY_PATH; return the library's path.

    Skips the test where there is no C compiler.
    """
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("no C compiler to make the libcuda test double with")
    source = folder / "libcuda_double.c"
    unused = "".join(f"EXPORT({name}, void) {{ return NOT_INITIALIZED; }}\n" for name in NOT_USED)
    source.write_text(SOURCE + unused, encoding="utf-8")
    library = folder / LIBRARY
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "LC_ALL": "C"})
    return library
