/* Reads golden vectors for test_vectors.py.

       read_vectors show FILE ARRAY    its kind, width and shape, and its elements
       read_vectors damage FILE ARRAY  each prefix of the file, and the file with each byte changed, in turn: how many
                                       were errors, and how many gave the array as it is; 2 if one gave another */
#include "hop_vectors.h"

static int show(const hop_array *x) {
    printf("%c%zu", x->kind, x->width);
    for (size_t i = 0; i < x->ndim; i++) printf(" %zu", x->shape[i]);
    printf("\n");
    for (size_t i = 0; i < x->count; i++) {
        if (x->kind == 'f')
            printf("%.17g\n", hop_real(x, i));
        else
            printf("%lld\n", (long long)hop_integer(x, i));
    }
    return 0;
}

/* 1 where a file of these bytes is an error, 0 where the array is the one that it was, -1 where it is another one. */
static int outcome(const unsigned char *bytes, size_t size, const char *name, const hop_array *was) {
    hop_file file;
    hop_array x;
    int found = 1;
    file.bytes = (unsigned char *)malloc(size ? size : 1); /* as large as it is, for the sanitizer to see */
    file.size = size;
    if (!file.bytes) return -1;
    memcpy(file.bytes, bytes, size);
    if (!hop_find(&file, name, &x)) {
        int same = x.count == was->count && x.width == was->width && x.kind == was->kind && x.ndim == was->ndim;
        found = same && !memcmp(x.data, was->data, x.count * x.width) ? 0 : -1;
    }
    hop_close(&file);
    return found;
}

static int damage(hop_file *file, const char *name, const hop_array *was) {
    static const unsigned char changes[] = {0xff, 0x01, 0x80};
    size_t errors = 0, kept = 0;
    for (size_t size = 0; size < file->size; size++) {
        int found = outcome(file->bytes, size, name, was);
        if (found < 0) return 2;
        errors += (size_t)found;
        kept += (size_t)!found;
    }
    if (kept) return 3; /* what is cut off is always seen */
    for (size_t i = 0; i < file->size; i++) {
        for (size_t k = 0; k < sizeof changes; k++) {
            int found;
            file->bytes[i] ^= changes[k];
            found = outcome(file->bytes, file->size, name, was);
            file->bytes[i] ^= changes[k];
            if (found < 0) return 2;
            errors += (size_t)found;
            kept += (size_t)!found;
        }
    }
    printf("%zu errors, %zu unharmed\n", errors, kept);
    return 0;
}

int main(int count, char **words) {
    hop_file file;
    hop_array x;
    int status = 1;
    if (count != 4) return 64;
    const char *wrong = hop_open(&file, words[2]);
    if (!wrong) wrong = hop_find(&file, words[3], &x);
    if (wrong)
        fprintf(stderr, "%s\n", wrong);
    else
        status = strcmp(words[1], "show") ? damage(&file, words[3], &x) : show(&x);
    hop_close(&file);
    return status;
}
