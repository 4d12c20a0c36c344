#include "/work/w/native/native/copy_crc32c.h"
#include <sys/mman.h>
#include <fcntl.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <vector>
#include <string>
#include <thread>
#include <atomic>
#include <algorithm>
#include <functional>
#include <sys/resource.h>
#include <cstdint>
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
using namespace replicator;
using C=std::chrono::steady_clock;
static size_t N;
static uint8_t *mem; static int fd; static uint8_t* kept;
double now(){return std::chrono::duration<double>(C::now().time_since_epoch()).count();}
double cpu(){rusage r;getrusage(RUSAGE_SELF,&r);return r.ru_utime.tv_sec+r.ru_utime.tv_usec/1e6+r.ru_stime.tv_sec+r.ru_stime.tv_usec/1e6;}
template<class W> void threads(int t,W w){std::vector<std::thread> v;for(int i=1;i<t;i++)v.emplace_back([&,i]{w(i);});w(0);for(auto&x:v)x.join();}
template<class W> void pieces(int t,size_t p,W w){std::atomic<size_t> at{0};threads(t,[&](int th){for(size_t o;(o=at.fetch_add(p))<N;)w(o,std::min(p,N-o),th);});}
volatile uint32_t sink_;
void v_memcpy(){memcpy(mem,kept,N);}
void v_memcpy2(){pieces(2,1<<20,[](size_t o,size_t n,int){memcpy(mem+o,kept+o,n);});}
void v_kept(int t){pieces(t,1<<20,[](size_t o,size_t n,int){sink_=copy_crc32c(mem+o,{kept+o,n},0);});}
void v_pop(int t,size_t p,bool pop){uint8_t*m=(uint8_t*)mmap(0,N,PROT_READ,MAP_SHARED,fd,0);pieces(t,p,[&](size_t o,size_t n,int){if(pop)madvise(m+o,n,MADV_POPULATE_READ);for(size_t q=0;q<n;q+=1<<20)sink_=copy_crc32c(mem+o+q,{m+o+q,std::min<size_t>(1<<20,n-q)},0);});munmap(m,N);}
void v_poponly(int t){uint8_t*m=(uint8_t*)mmap(0,N,PROT_READ,MAP_SHARED,fd,0);pieces(t,1<<20,[&](size_t o,size_t n,int){madvise(m+o,n,MADV_POPULATE_READ);});munmap(m,N);}
void v_pread(int t,size_t c){pieces(t,1<<20,[&](size_t o,size_t n,int){uint32_t s=0;for(size_t q=0;q<n;q+=c){if(pread(fd,mem+o+q,c,o+q)!=(ssize_t)c)abort();s=crc32c(s,{mem+o+q,c});}sink_=s;});}
void v_preadonly(int t,size_t c){pieces(t,1<<20,[&](size_t o,size_t n,int){for(size_t q=0;q<n;q+=c){if(pread(fd,mem+o+q,c,o+q)!=(ssize_t)c)abort();}});}
void v_bounce(int t,size_t c){const Crc32cKernel&k=crc32c_kernels().front();static uint8_t*b[8];for(int i=0;i<t;i++)if(!b[i]){b[i]=(uint8_t*)aligned_alloc(4096,4<<20);memset(b[i],1,4<<20);}
 pieces(t,1<<20,[&](size_t o,size_t n,int th){uint32_t s=~0u;for(size_t q=0;q<n;q+=c){if(pread(fd,b[th],c,o+q)!=(ssize_t)c)abort();s=k.copy(s,mem+o+q,b[th],c);}sink_=s;});}
void v_bounceonly(int t,size_t c){static uint8_t*b[8];for(int i=0;i<t;i++)if(!b[i]){b[i]=(uint8_t*)aligned_alloc(4096,4<<20);memset(b[i],1,4<<20);}
 pieces(t,1<<20,[&](size_t o,size_t n,int th){for(size_t q=0;q<n;q+=c){if(pread(fd,b[th],c,o+q)!=(ssize_t)c)abort();}});}
int main(int c,char**v){N=(size_t)atol(v[2])<<20;std::string p=std::string(v[1])+"/native-exp-XXXXXX";fd=mkstemp(p.data());unlink(p.data());if(posix_fallocate(fd,0,N))abort();
 kept=(uint8_t*)mmap(0,N,PROT_READ|PROT_WRITE,MAP_SHARED,fd,0);
 mem=(uint8_t*)mmap(0,N+4096,PROT_READ|PROT_WRITE,MAP_PRIVATE|MAP_ANONYMOUS,-1,0);
 if(c>3)madvise(mem,N,MADV_HUGEPAGE);
 for(size_t i=0;i<N;i+=8)*(uint64_t*)(kept+i)=i*2654435761u;memset(mem,1,N);
 struct V{const char*n;std::function<void()>f;std::vector<double>t,c;};
 std::vector<V> vs={{"memcpy kept 1t",v_memcpy},{"memcpy kept 2t",v_memcpy2},{"fused kept 1t",[]{v_kept(1);}},{"fused kept 2t",[]{v_kept(2);}},
 {"populate only 1t",[]{v_poponly(1);}},{"populate only 2t",[]{v_poponly(2);}},
 {"populate+fused 2t 1M (today)",[]{v_pop(2,1<<20,true);}},{"populate+fused 2t 8M",[]{v_pop(2,8<<20,true);}},{"populate+fused 2t 256K",[]{v_pop(2,256<<10,true);}},{"faultaround+fused 2t",[]{v_pop(2,1<<20,false);}},
 {"pread only 1t 256K",[]{v_preadonly(1,256<<10);}},{"pread only 2t 256K",[]{v_preadonly(2,256<<10);}},
 {"pread+crc 1t 256K",[]{v_pread(1,256<<10);}},{"pread+crc 2t 64K",[]{v_pread(2,64<<10);}},{"pread+crc 2t 128K",[]{v_pread(2,128<<10);}},{"pread+crc 2t 256K",[]{v_pread(2,256<<10);}},{"pread+crc 2t 1M",[]{v_pread(2,1<<20);}},
 {"bounce only 1t 128K",[]{v_bounceonly(1,128<<10);}},{"bounce only 2t 128K",[]{v_bounceonly(2,128<<10);}},
 {"bounce+NT 1t 128K",[]{v_bounce(1,128<<10);}},{"bounce+NT 2t 16K",[]{v_bounce(2,16<<10);}},{"bounce+NT 2t 64K",[]{v_bounce(2,64<<10);}},{"bounce+NT 2t 128K",[]{v_bounce(2,128<<10);}},{"bounce+NT 2t 256K",[]{v_bounce(2,256<<10);}}};
 for(int r=0;r<6;r++)for(auto&x:vs){double a=now(),b=cpu();x.f();double d=now()-a,e=cpu()-b;if(r){x.t.push_back(d);x.c.push_back(e);}}
 double base=0;for(auto&x:vs){std::sort(x.t.begin(),x.t.end());std::sort(x.c.begin(),x.c.end());double m=x.t[2];if(!base)base=m;printf("%-32s %6.2f GB/s  ratio %.2f cpu %.3f\n",x.n,N/m/1e9,base/m,x.c[2]/N*1e9);}
}
