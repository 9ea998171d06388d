// The Python module `_kernel`: pointers, sizes and handles come in as integers, all checks are made in
// Python (accumulate.py). Plain Python.h, because torch's and pybind11's headers cost 10 to 35 s.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "fused_accumulate.h"

namespace {

void* as_pointer(unsigned long long address) { return reinterpret_cast<void*>(uintptr_t(address)); }

// accumulate_cpu(out, recv, row_stride, rows, size, wire, scale, threads)
PyObject* py_accumulate_cpu(PyObject*, PyObject* args) {
  unsigned long long out, recv;
  long long row_stride, rows, size;
  int wire, threads;
  double scale;
  if (!PyArg_ParseTuple(args, "KKLLLidi", &out, &recv, &row_stride, &rows, &size, &wire, &scale, &threads)) {
    return nullptr;
  }
  Py_BEGIN_ALLOW_THREADS
  dslr::accumulate_cpu(static_cast<float*>(as_pointer(out)), as_pointer(recv), row_stride, rows, size,
                       dslr::Wire(wire), float(scale), threads);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

#if defined(DSLR_GPU)
// accumulate_gpu(out, recv, row_stride, rows, size, wire, scale, device, stream)
PyObject* py_accumulate_gpu(PyObject*, PyObject* args) {
  unsigned long long out, recv, stream;
  long long row_stride, rows, size;
  int wire, device;
  double scale;
  if (!PyArg_ParseTuple(args, "KKLLLidiK", &out, &recv, &row_stride, &rows, &size, &wire, &scale, &device,
                        &stream)) {
    return nullptr;
  }
  const char* error;
  Py_BEGIN_ALLOW_THREADS
  error = dslr::accumulate_gpu(static_cast<float*>(as_pointer(out)), as_pointer(recv), row_stride, rows, size,
                               dslr::Wire(wire), float(scale), device, as_pointer(stream));
  Py_END_ALLOW_THREADS
  if (error != nullptr) {
    PyErr_Format(PyExc_RuntimeError, "fused_accumulate: launch on device %d failed: %s", device, error);
    return nullptr;
  }
  Py_RETURN_NONE;
}
#endif

PyMethodDef methods[] = {
    {"accumulate_cpu", py_accumulate_cpu, METH_VARARGS, nullptr},
#if defined(DSLR_GPU)
    {"accumulate_gpu", py_accumulate_gpu, METH_VARARGS, nullptr},
#endif
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernel", "Fused accumulate; see csrc/binding.cpp.", -1, methods,
};

}  // namespace

PyMODINIT_FUNC PyInit__kernel() { return PyModule_Create(&module); }
