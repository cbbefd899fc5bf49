use std::env;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig};

use super::EtcdError;

const CA: &str = "UNISONO_ETCD_CA";
const CERT: &str = "UNISONO_ETCD_CERT";
const KEY: &str = "UNISONO_ETCD_KEY";
const USER: &str = "UNISONO_ETCD_USER";
const PASSWORD: &str = "UNISONO_ETCD_PASSWORD";

/// How to prove to etcd who we are, and it to us. All of it is optional.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// A PEM file with the certificates of the authorities that sign those of etcd. Without it, the
    /// authorities that browsers trust.
    pub ca: Option<PathBuf>,
    /// A PEM file with the certificate of this client, and those that lead from it to an authority.
    pub cert: Option<PathBuf>,
    /// A PEM file with the private key of that certificate.
    pub key: Option<PathBuf>,
    /// The user's name.
    pub user: Option<String>,
    /// The user's password.
    pub password: Option<Password>,
}

impl Settings {
    /// The settings in `UNISONO_ETCD_CA`, `_CERT`, `_KEY`, `_USER` and `_PASSWORD`. One that is empty
    /// counts as unset.
    ///
    /// # Errors
    ///
    /// [`EtcdError::BadSetting`] for a user or password that is not UTF-8.
    pub fn from_env() -> Result<Settings, EtcdError> {
        Settings::from_variables(|name| env::var_os(name))
    }

    fn from_variables(get: impl Fn(&str) -> Option<OsString>) -> Result<Settings, EtcdError> {
        let get = |name| get(name).filter(|value| !value.is_empty());
        let text = |name| match get(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(text)) => Ok(Some(text)),
            Some(Err(_)) => Err(bad(name, "is not UTF-8")),
        };
        Ok(Settings {
            ca: get(CA).map(PathBuf::from),
            cert: get(CERT).map(PathBuf::from),
            key: get(KEY).map(PathBuf::from),
            user: text(USER)?,
            password: text(PASSWORD)?.map(Password),
        })
    }

    /// User and password, if they are set.
    pub(super) fn credentials(&self) -> Result<Option<(String, Password)>, EtcdError> {
        match (&self.user, &self.password) {
            (None, None) => Ok(None),
            (Some(user), Some(password)) => Ok(Some((user.clone(), password.clone()))),
            (Some(_), None) => Err(bad(PASSWORD, "is not set, and UNISONO_ETCD_USER is; set both")),
            (None, Some(_)) => Err(bad(USER, "is not set, and UNISONO_ETCD_PASSWORD is; set both")),
        }
    }

    /// Reads the files.
    pub(super) fn tls(&self) -> Result<TlsConfig, EtcdError> {
        let mut tls = TlsConfig::builder();
        if let Some(path) = &self.ca {
            let authorities: Vec<_> = certificates(CA, path)?.iter().map(own).collect();
            tls = tls.root_certs(RootCerts::Specific(Arc::new(authorities)));
        }
        match (&self.cert, &self.key) {
            (None, None) => {}
            (Some(cert), Some(key)) => {
                tls = tls.client_cert(Some(client_certificate(cert, key)?));
            }
            (Some(_), None) => {
                return Err(bad(KEY, "is not set, and UNISONO_ETCD_CERT is; set both"));
            }
            (None, Some(_)) => {
                return Err(bad(CERT, "is not set, and UNISONO_ETCD_KEY is; set both"));
            }
        }
        Ok(tls.build())
    }
}

/// A password, which is shown in no output.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    /// This password.
    pub fn new(text: impl Into<String>) -> Password {
        Password(text.into())
    }

    pub(super) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password(…)")
    }
}

fn client_certificate(cert: &Path, key: &Path) -> Result<ClientCert, EtcdError> {
    let chain = certificates(CERT, cert)?;
    let text = read(KEY, key)?;
    let in_file = |problem| bad(KEY, format!("{}: {problem}", key.display()));
    let der = PrivateKeyDer::from_pem_slice(&text)
        .map_err(|_| in_file("has no private key in PEM".to_owned()))?;
    // ureq panics over a key that does not belong to its certificate.
    CertifiedKey::from_der(chain.clone(), der, &default_provider())
        .map_err(|error| in_file(format!("does not belong to UNISONO_ETCD_CERT: {error}")))?;
    let private = PrivateKey::from_pem(&text).map_err(|error| in_file(error.to_string()))?;
    let chain: Vec<_> = chain.iter().map(own).collect();
    Ok(ClientCert::new_with_certs(&chain, private))
}

fn certificates(
    variable: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, EtcdError> {
    let text = read(variable, path)?;
    match CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>() {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        _ => Err(bad(variable, format!("{} has no certificate in PEM", path.display()))),
    }
}

fn own(certificate: &CertificateDer<'static>) -> Certificate<'static> {
    Certificate::from_der(certificate).to_owned()
}

fn read(variable: &'static str, path: &Path) -> Result<Vec<u8>, EtcdError> {
    fs::read(path)
        .map_err(|error| bad(variable, format!("cannot read {}: {error}", path.display())))
}

fn bad(variable: &'static str, reason: impl Into<String>) -> EtcdError {
    EtcdError::BadSetting { variable, reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_become_settings_and_the_password_is_not_shown() {
        let get = |name: &str| match name {
            CA => Some("/ca.pem".into()),
            USER => Some("root".into()),
            PASSWORD => Some("secret".into()),
            KEY => Some("".into()),
            _ => None,
        };
        let settings = Settings::from_variables(get).unwrap();
        assert_eq!(settings.ca.as_deref(), Some(Path::new("/ca.pem")));
        assert_eq!((&settings.cert, &settings.key), (&None, &None));
        let (user, password) = settings.credentials().unwrap().unwrap();
        assert_eq!((&*user, password.reveal()), ("root", "secret"));
        assert!(!format!("{settings:?}").contains("secret"));
    }

    #[test]
    fn what_is_missing_or_unreadable_is_named() {
        let complaint = |settings: Settings| {
            settings.credentials().map(|_| ()).and(settings.tls().map(|_| ())).unwrap_err()
        };
        let user = Settings { user: Some("root".into()), ..Settings::default() };
        assert!(complaint(user).to_string().starts_with("UNISONO_ETCD_PASSWORD: is not set"));
        let cert = Settings { cert: Some("/c".into()), ..Settings::default() };
        assert!(complaint(cert).to_string().starts_with("UNISONO_ETCD_KEY: is not set"));
        let ca = Settings { ca: Some("/no/such/file".into()), ..Settings::default() };
        assert!(complaint(ca).to_string().contains("cannot read /no/such/file"));
        let ca = Settings { ca: Some("/dev/null".into()), ..Settings::default() };
        assert!(complaint(ca).to_string().contains("has no certificate"));
    }
}
