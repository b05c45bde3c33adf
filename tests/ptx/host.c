/* Stands in for the CUDA runtime that the host code of a kernel calls, and hands each launch to `on_launch`. */

#include <string.h>

typedef void (*launch_t)(const void *config, const char *kernel, void **parameters);
typedef void (*packed_t)(void **);

enum { SHARED_BYTES = 227 * 1024 };

static launch_t on_launch;

void set_launch(launch_t f) { on_launch = f; }

int _cudaLaunchKernelEx(const void *config, void *kernel, void **parameters) {
  on_launch(config, (const char *)kernel, parameters);
  return 0;
}

/* A kernel is its name. */
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  *kernel = strdup(name);
  return 0;
}

int _cudaLibraryLoadData(void **library) {
  *library = (void *)1;
  return 0;
}

int _cudaGetDevice(int *device) { return *device = 0; }
int _cudaSetDevice(int device) { return 0; }

/* Asked only for the shared memory that a block may have. */
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  *value = SHARED_BYTES;
  return 0;
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { return *value = 0; }
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }

int cuda_dialect_init_library_once(void **state, packed_t init, packed_t load, void *on_error) {
  static void *library;
  void *where = &library;
  int code = 0, device = 0;
  void *of_init[] = {&where, &code}, *of_load[] = {&where, &device, &code};
  if (*state) return 0;
  init(of_init);
  if (!code) load(of_load);
  if (!code) *state = where;
  return code;
}

void cuda_dialect_unload_library_once(void **state) {}
void CuteDSLRT_TVMFFISetRaisedCudaError(const char *kind, int code) {}
