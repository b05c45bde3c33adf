/* Read golden vectors in C99: the arrays of .npz files. Needs only the C library.

       hop_file file;
       hop_array x;
       const char *wrong = hop_open(&file, "000_conv2d.npz");
       if (!wrong) wrong = hop_find(&file, "input", &x);
       if (wrong) fprintf(stderr, "%s\n", wrong);
       else for (size_t i = 0; i < x.count; i++) printf("%lld\n", (long long)hop_integer(&x, i));
       hop_close(&file);

   Functions that can fail return NULL on success and an error message otherwise. Truncated, modified and foreign files
   are errors: no byte outside the file is read. Elements are in C order. */
#ifndef HOP_VECTORS_H
#define HOP_VECTORS_H

#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HOP_DIMS = 16, HOP_HEADER = 4096 };

typedef struct {
    unsigned char *bytes;
    size_t size;
} hop_file;

typedef struct {
    char kind;    /* 'i' signed, 'u' unsigned, 'b' 0 or 1, 'f' floating point */
    size_t width; /* bytes of an element */
    size_t ndim, shape[HOP_DIMS], count;
    const unsigned char *data; /* little-endian, without alignment; until hop_close */
} hop_array;

static inline uint64_t hop_bits(const unsigned char *p, size_t width) {
    uint64_t x = 0;
    for (size_t i = 0; i < width; i++) x |= (uint64_t)p[i] << (8 * i);
    return x;
}

static inline void hop_close(hop_file *file) {
    free(file->bytes);
    file->bytes = NULL;
    file->size = 0;
}

/* Read a file into memory. Calling hop_close afterwards is safe even on failure. */
static inline const char *hop_open(hop_file *file, const char *path) {
    FILE *f = fopen(path, "rb");
    long size;
    file->bytes = NULL;
    file->size = 0;
    if (!f) return "the file cannot be opened";
    if (fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0 || size == LONG_MAX || fseek(f, 0, SEEK_SET)) {
        fclose(f);
        return "the file cannot be read";
    }
    file->bytes = (unsigned char *)malloc((size_t)size + 1);
    if (file->bytes) file->size = fread(file->bytes, 1, (size_t)size, f);
    fclose(f);
    if (file->bytes && file->size == (size_t)size) return NULL;
    hop_close(file);
    return "the file cannot be read";
}

/* Find the directory of a zip archive: the start, number and end of its records. */
static inline const char *hop_directory(const hop_file *file, size_t *at, size_t *count, size_t *end) {
    for (size_t back = 22; back <= file->size && back < 22 + 65536; back++) {
        const unsigned char *p = file->bytes + (file->size - back);
        if (hop_bits(p, 4) != 0x06054b50) continue;
        *count = (size_t)hop_bits(p + 10, 2);
        *at = (size_t)hop_bits(p + 16, 4);
        *end = file->size - back;
        return *at <= *end ? NULL : "the archive's directory is outside the file";
    }
    return "the file is not an .npz archive, or is truncated";
}

static inline uint32_t hop_crc(const unsigned char *p, size_t size) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < size; i++) {
        crc ^= p[i];
        for (int k = 0; k < 8; k++) crc = (crc >> 1) ^ (0xedb88320u & (0u - (crc & 1u)));
    }
    return ~crc;
}

/* Parse the header that numpy writes before the elements: dtype and shape. */
static inline const char *hop_header(const unsigned char *p, size_t size, hop_array *array) {
    char text[HOP_HEADER + 1];
    size_t length, before, bytes;
    const char *at;
    if (size < 12 || memcmp(p, "\x93NUMPY", 6) || p[6] < 1 || p[6] > 3) return "it is not a numpy array";
    before = p[6] == 1 ? 10 : 12;
    length = (size_t)hop_bits(p + 8, before - 8);
    if (length > HOP_HEADER || length > size - before) return "its header is truncated or too long";
    memcpy(text, p + before, length);
    text[length] = 0;
    at = strstr(text, "'descr': '");
    if (!at || !memchr("<|", at[10], 2) || !memchr("iubf", at[11], 4) || !memchr("1248", at[12], 4) || at[13] != '\'')
        return "its elements are not little-endian numbers of 1, 2, 4 or 8 bytes";
    array->kind = at[11];
    array->width = (size_t)(at[12] - '0');
    if (!strstr(text, "'fortran_order': False")) return "its elements are not in C order";
    at = strstr(text, "'shape': (");
    if (!at) return "it has no shape";
    array->ndim = 0;
    array->count = 1;
    bytes = size - before - length;
    for (at += 10; *at && *at != ')'; at++) {
        size_t n = 0;
        if (*at == ' ' || *at == ',') continue;
        if (*at < '0' || *at > '9' || array->ndim == HOP_DIMS) return "its shape cannot be read";
        for (; *at >= '0' && *at <= '9'; at++) {
            if (n > (SIZE_MAX - 9) / 10) return "its shape is too large";
            n = n * 10 + (size_t)(*at - '0');
        }
        at--;
        if (n && array->count > SIZE_MAX / n) return "its shape is too large";
        array->shape[array->ndim++] = n;
        array->count *= n;
    }
    if (*at != ')' || array->count > bytes / array->width || array->count * array->width != bytes)
        return "its shape does not match its size";
    array->data = p + before + length;
    return NULL;
}

/* Find an array by name, such as "input", "weight.scale" or "sums". */
static inline const char *hop_find(const hop_file *file, const char *name, hop_array *array) {
    size_t at = 0, count = 0, end = 0, wanted = strlen(name);
    const char *wrong = hop_directory(file, &at, &count, &end);
    if (wrong) return wrong;
    while (count--) {
        const unsigned char *p = file->bytes + at, *local;
        size_t size, own, start, before;
        if (end - at < 46 || hop_bits(p, 4) != 0x02014b50) return "the archive's directory is damaged";
        own = (size_t)hop_bits(p + 28, 2);
        before = 46 + own + (size_t)hop_bits(p + 30, 2) + (size_t)hop_bits(p + 32, 2);
        if (end - at < before) return "the archive's directory is damaged";
        at += before;
        if (own != wanted + 4 || memcmp(p + 46, name, wanted) || memcmp(p + 46 + wanted, ".npy", 4)) continue;
        size = (size_t)hop_bits(p + 24, 4);
        start = (size_t)hop_bits(p + 42, 4);
        if (hop_bits(p + 10, 2) || hop_bits(p + 20, 4) != size || size == 0xffffffffu)
            return "the array is compressed, or has 4 GiB or more";
        if (start > end || end - start < 30) return "the array is outside the file";
        local = file->bytes + start;
        before = 30 + (size_t)hop_bits(local + 26, 2) + (size_t)hop_bits(local + 28, 2);
        if (hop_bits(local, 4) != 0x04034b50 || end - start < before || end - start - before < size)
            return "the array is outside the file";
        if (hop_crc(local + before, size) != (uint32_t)hop_bits(p + 16, 4)) return "the array is damaged";
        return hop_header(local + before, size, array);
    }
    return "there is no array of that name";
}

/* Element i of an integer array. */
static inline int64_t hop_integer(const hop_array *array, size_t i) {
    uint64_t x = hop_bits(array->data + i * array->width, array->width), sign = (uint64_t)1 << (8 * array->width - 1);
    if (array->kind != 'i' || !(x & sign)) return (int64_t)(x & INT64_MAX);
    return -(int64_t)(~(x | ~(sign | (sign - 1)))) - 1;
}

/* Element i of any array. Floats in these files have 4 or 8 bytes. */
static inline double hop_real(const hop_array *array, size_t i) {
    uint64_t bits = hop_bits(array->data + i * array->width, array->width);
    uint32_t half = (uint32_t)bits;
    float single;
    double result;
    if (array->kind != 'f') return (double)hop_integer(array, i);
    memcpy(&single, &half, 4);
    memcpy(&result, &bits, 8);
    return array->width == 4 ? (double)single : result;
}

#endif
